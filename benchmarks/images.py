"""Throughput at image size: a bridged step against a plain forward and backward, and annealed chains.

    python benchmarks/images.py --device cuda [--bridges 24] [--batch 128] [--chains 128]
    python benchmarks/images.py --quick

The network is that of the study (`unnorm reproduce mnist`) but for dropout, on standard normal points: its speed does
not depend on what they show. A bridged step is `fit`'s whole step: waymarks, loss, backward, optimizer and the
average of the weights; the plain one is a forward and a backward of the same network over as many points. Utilisation
counts the products of the convolutions and layers (`torch.utils.flop_counter`), three times a forward, over the peak
given (989 TFLOP/s of bf16 for an H200); a CPU has none. --quick is a smoke test on the CPU: little of everything.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from figures import figure
from torch.utils.flop_counter import FlopCounterMode

from unnorm import Bridged, Gaussian, ResNet, Telescope, Training, fit
from unnorm.device import fabric_for
from unnorm.images import fast
from unnorm.partition.routes import Waymarks
from unnorm.samplers import HMC
from unnorm.samplers.base import frozen


def seconds_of(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one call, after three to warm up."""
    for _ in range(3):
        call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    _wait(device)
    return (time.perf_counter() - began) / rounds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bridges", type=int, default=24)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--chains", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the device in bf16")
    options = parser.parse_args()
    event, widths, features = (1, 28, 28), [64, 128, 128, 128], 256
    if options.quick:
        event, widths, features = (1, 8, 8), [8, 16], 16
        options.bridges, options.batch, options.chains, options.steps = 4, 32, 16, 40
    torch.set_float32_matmul_precision("high")
    fabric = fabric_for(options.device, "bf16" if options.device != "cpu" else "32")
    device = fabric.device
    noise = Gaussian(event, "diagonal").to(device)
    net = ResNet(event, widths, 2, features, options.bridges, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, *event))
    forward_flop = counter.get_total_flops()
    model = fast(Bridged(noise, net), device)
    data = torch.randn(4096, *event, generator=torch.Generator().manual_seed(0))
    warm, steps = max(20, options.steps // 4), options.steps
    training = Training(steps=warm + steps, batch=options.batch, iterate="ema", log_every=warm, schedule="cosine")
    history = fit(model, Telescope(noise, options.bridges), data, training, fabric=fabric, progress=False)
    seconds = dict(zip(history["step"], history["seconds"], strict=True))
    step = (seconds[warm + steps] - seconds[warm]) / steps
    points = torch.randn(options.batch * (options.bridges + 1), *event, device=device)
    model.train()

    def plain() -> None:
        with fabric.autocast():
            total = model(points, heads=True).sum()
        total.float().backward()
        model.zero_grad()

    floor = seconds_of(plain, device, max(5, steps // 4))
    used = 3 * forward_flop * len(points)
    print(f"a bridged step {1e3 * step:.2f} ms, {len(points) / step:,.0f} images/s; plain {1e3 * floor:.2f} ms")
    print(f"{forward_flop / 1e6:.0f} MFLOP for an image forward; {used / step / 1e12:.1f} TFLOP/s in training")
    good = figure("bridged step over a plain forward and backward", step / floor, None if options.quick else 1.15)
    if device.type == "cuda":
        figure("model FLOP/s utilisation of a bridged step", used / step / options.peak, None)
    model.eval()
    with frozen(model), torch.no_grad():
        way, sampler = Waymarks(model, noise), HMC(0.1, 10)
        here = way.at(0.5)
        state = here.position(torch.randn(options.chains, *event, device=device))
        transition = seconds_of(lambda: sampler.step(state, here), device, 10 if options.quick else 50)
    rate = options.chains * sampler.leapfrog_steps / transition
    print(f"{options.chains} chains: {1e3 * transition:.2f} ms for {sampler.leapfrog_steps} leapfrog steps")
    figure("chain-steps a second of annealed chains", rate, None)
    return good


if __name__ == "__main__":
    sys.exit(not main())
