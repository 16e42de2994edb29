"""MNIST by bridges: copula noise, a residual trunk with a head for each bridge, bits per dimension between two bounds.

    python benchmarks/bridges_mnist.py --folder runs/mnist --device cuda [--steps 6000] [--bridges 24] [--base meco]
    python benchmarks/bridges_mnist.py --quick

Images are dequantised anew at each reading. The noise is the Gaussian copula of the training images; waymarks and
chains live in its own coordinates, where it is a standard normal, and the network sees pixels' normal scores. log Z is
annealed from both ends on one schedule, backwards from test images: the lower bound makes the likelihood look better
than it is, the upper one worse, and both are reported on all 10,000 test images. A killed run continues with the same
command: training from its checkpoint, the chains anew. --quick is a smoke test on the CPU: little of everything.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from figures import figure
from safetensors.torch import load_file, save_file
from torch import Tensor

from unnorm import Bridged, Noise, ResNet, Seen, Telescope, Training, loop
from unnorm.data import Compose, Dequantize, ImageRows, Transform, mnist
from unnorm.device import fabric_for
from unnorm.estimators import MECO, NCE, Contrastive
from unnorm.metrics import BitsPerDim, bits_per_dim
from unnorm.noise import Copula
from unnorm.partition import ais, bracket, plan
from unnorm.partition.annealed import settled
from unnorm.plots import sheet
from unnorm.types import LogZ

BASES: dict[str, type[Contrastive]] = {"meco": MECO, "nce": NCE}
PAPER = {"meco": 1.394, "nce": 1.457}  # bits per dimension, the paper's Table 5
EDGES = torch.arange(257) / 256
MORE = 50


def coordinates(train: Tensor, device: torch.device) -> tuple[Compose, Noise, Transform]:
    """From integers to the copula's coordinates, the noise there, and the last step alone."""
    scaled = Dequantize(256)(train.double(), generator=torch.Generator().manual_seed(0))[0]
    copula = Copula.fit(scaled, EDGES)
    whiten, noise = copula.base.coordinates()
    return Compose([Dequantize(256), copula.transform, whiten]).to(device), noise.to(device), whiten.to(device)


def shown(name: str, found: BitsPerDim, log_z: LogZ) -> dict[str, float | str]:
    print(f"{name:8s} log Z {log_z.value:9.3f} +- {log_z.stderr:.3f}: {found.value:.4f} +- {found.stderr:.4f} bits/dim")
    return {"side": name, "log_z": log_z.value, "log_z_stderr": log_z.stderr, "bits": found.value, "se": found.stderr}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--folder", type=Path, default=Path("runs/mnist-bridges"))
    parser.add_argument("--root", help="the folder with the idx files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="32", help="of training; bf16 on a GPU")
    parser.add_argument("--base", choices=BASES, default="meco")
    parser.add_argument("--bridges", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--betas", type=int, help="temperatures; found by a pilot when left out")
    parser.add_argument("--net", type=Path, help="a trained net.safetensors: only log Z is left to find")
    parser.add_argument("--train-only", action="store_true", help="stop before log Z")
    options = parser.parse_args()
    train, test = (mnist(options.root, train=part).images for part in (True, False))
    widths, blocks, features = [64, 128, 128], 2, 256
    if options.quick:
        train, test, widths, blocks, features = train[:3000], test[:200], [4, 8], 1, 16
        options.bridges, options.steps, options.batch, options.chains, options.betas = 4, 20, 16, 16, 20
        options.folder = options.folder / "quick"
    torch.set_float32_matmul_precision("high")
    fabric = fabric_for(options.device, options.precision)
    device, began = fabric.device, time.perf_counter()
    transform, noise, whiten = coordinates(train, device)
    generator = torch.Generator(device).manual_seed(1)
    net = ResNet(train.shape[1:], widths, blocks, features, options.bridges, generator=torch.Generator().manual_seed(0))
    model = Bridged(noise, Seen(whiten, net)).to(device)
    estimator = Telescope(noise, options.bridges, BASES[options.base])
    print(f"{sum(p.numel() for p in net.parameters()):,} weights; noise fitted in {time.perf_counter() - began:.0f} s")
    resume = (options.folder / "checkpoint.safetensors").exists() and not options.quick
    training = Training(steps=options.steps, batch=options.batch, lr=options.lr, schedule="cosine")
    if options.quick:
        for old in options.folder.glob("*"):
            old.unlink()
    seconds: float | None = None
    if options.net:
        net.load_state_dict(load_file(options.net))
    else:
        history = loop.train(
            model,
            estimator,
            ImageRows(train, transform, device, generator),
            training,
            fabric=fabric,
            folder=options.folder,
            resume=resume,
        )
        seconds = history["seconds"][-1]
        print(
            f"trained {options.steps} steps in {seconds:.0f} s; largest gap of a bridge {history['gap'][-1]:.2f} nats"
        )
        save_file({name: part.cpu() for name, part in net.state_dict().items()}, options.folder / "net.safetensors")
    model.eval()
    if options.train_only:
        return True
    images = test.to(device)

    def scored(log_z: LogZ) -> BitsPerDim:
        own = torch.Generator(device).manual_seed(2)
        return bits_per_dim(model, images, transform, log_z=log_z, chunk=1000, generator=own)

    began = time.perf_counter()
    schedule = plan(model, noise, n_betas=options.betas, generator=generator)
    print(f"pilot: {len(schedule)} temperatures, length {schedule.length:.1f}, {time.perf_counter() - began:.0f} s")
    held_out = ImageRows(images, transform, device, generator)[
        torch.arange(0, len(images), max(1, len(images) // options.chains))
    ]
    forward = ais(model, noise, n_chains=options.chains, schedule=schedule, generator=generator)
    ends = settled(forward, model, noise, MORE, generator=generator)
    sheet(options.folder / "samples.png", transform.inverse(ends.x[:100]))
    print(f"from the noise: log Z {forward.log_z}, {time.perf_counter() - began:.0f} s", flush=True)
    found = bracket(model, noise, held_out, n_chains=options.chains, forward=forward, settle=20, generator=generator)
    print(f"bracket in {time.perf_counter() - began:.0f} s")
    rows = [
        shown(name, scored(log_z), log_z)
        for name, log_z in (("lower", found.lower), ("joined", found.log_z), ("upper", found.upper))
    ]
    config = {**vars(options), "folder": None, "widths": widths, "blocks": blocks, "features": features}
    record = {"config": config, "seconds": seconds, "betas": len(schedule), "unseen": found.unseen, "sides": rows}
    (options.folder / "bits.json").write_text(json.dumps(record, default=str) + "\n")
    bits = float(rows[1]["bits"])
    return figure(f"mnist bits/dim by bridges, {options.base}", bits, None if options.quick else PAPER[options.base])


if __name__ == "__main__":
    sys.exit(not main())
