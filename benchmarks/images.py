"""Throughput at image size: a bridged step against a plain forward and backward, annealed chains, pixel by pixel.

    python benchmarks/images.py --device cuda [--size full] [--bridges 24] [--batch 128] [--chains 128]
    python benchmarks/images.py --size desktop --precision bf16
    python benchmarks/images.py --quick

The networks are those of the study (`unnorm reproduce mnist`) at that size with Gaussian noise, all their views of
pixels included, on standard normal points: their speed does not depend on what they show. A bridged step is `fit`'s
whole step: waymarks, loss, backward, optimizer and the average of the weights; the plain one is a forward and a
backward of the same network over as many points. Utilisation counts the products of the convolutions and layers
(`torch.utils.flop_counter`), three times a forward, over the rate of a large matrix product in the same precision,
measured in the same run, or over the --peak given. Pixel by pixel: `fit`'s whole step of a `StepwiseTelescope` against
a forward and backward of the same heads at the same data and draws; images whose density is computed a second,
and images that are drawn. --quick is a smoke test on the CPU: little of everything.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from figures import figure
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unnorm import Gaussian, Telescope, Training, train
from unnorm.data import Compose, Dequantize, Logit, Whiten
from unnorm.device import Machine, fabric_for
from unnorm.estimators import Estimator, StepwiseTelescope
from unnorm.images import Coordinates, bridged, fast, stepwise
from unnorm.paper.mnist.spec import SIZES
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


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--only", choices=("waymarks", "pixels"), help="one part only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("32", "bf16"), help="bf16 on a GPU, 32 elsewhere unless given")
    parser.add_argument("--size", choices=tuple(SIZES), help="of the study; full on a GPU, desktop elsewhere")
    parser.add_argument("--bridges", type=int, help="those of the study's first trial unless given")
    parser.add_argument("--batch", type=int, help="images at each waymark, the study's unless given")
    parser.add_argument("--few", type=int, help="images of a step pixel by pixel, the study's unless given")
    parser.add_argument("--chains", type=int, help="the study's unless given")
    parser.add_argument("--draws", type=int, help="of the noise for each image and pixel, the study's unless given")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peak", type=float, help="FLOP/s of the device; measured unless given")
    options = parser.parse_args()
    options.size = "smoke" if options.quick else options.size or ("desktop" if options.device == "cpu" else "full")
    options.steps = 40 if options.quick else options.steps
    plan = SIZES[options.size]
    for name in ("batch", "few", "chains", "draws"):
        setattr(options, name, getattr(options, name) or getattr(plan, name))
    options.bridges = options.bridges or plan.even
    options.event = (1, 28, 28) if plan.data == "mnist" else (1, 8, 8)
    options.net, options.lookback = dict(plan.net), dict(plan.lookback)
    return options


def place_of(options: argparse.Namespace) -> Coordinates:
    """Coordinates as those of the Gaussian noise of the study, fitted to nothing: logits, whitened by the identity."""
    levels, whiten = 256 if options.event[1] == 28 else 17, Whiten(options.event)
    way = Compose([Dequantize(levels), Logit(1e-6), whiten])
    return Coordinates(way, Gaussian(options.event, "diagonal"), whiten, Logit(1e-6), ("shade", "ends"))


def peak_of(device: torch.device, fabric: Machine) -> float:
    """FLOP/s of a large matrix product under the fabric's autocast."""
    side = 8192 if device.type == "cuda" else 2048
    left, right = torch.randn(2, side, side, device=device).unbind()

    def product() -> None:
        with fabric.autocast():
            left @ right

    return 2 * side**3 / seconds_of(product, device, 10)


def main() -> bool:
    options = options_given()
    torch.set_float32_matmul_precision("high")
    fabric = fabric_for(options.device, options.precision or ("bf16" if options.device != "cpu" else "32"))
    parts = {"waymarks": over_waymarks, "pixels": by_pixels}
    good = [part(options, fabric) for name, part in parts.items() if options.only in (None, name)]
    return all(good)


def step_of(model: nn.Module, estimator: Estimator, fabric: Machine, batch: int, options: argparse.Namespace) -> float:
    """Seconds of `fit`'s whole step, after some to warm up."""
    data = torch.randn(4096, *options.event, generator=torch.Generator().manual_seed(0))
    warm, steps = max(20, options.steps // 4), options.steps
    training = Training(steps=warm + steps, batch=batch, iterate="ema", log_every=warm, schedule="cosine")
    history = train(model, estimator, data, training, fabric=fabric, progress=False)
    seconds = dict(zip(history["step"], history["seconds"], strict=True))
    return (seconds[warm + steps] - seconds[warm]) / steps


def by_pixels(options: argparse.Namespace, fabric: Machine) -> bool:
    event, device, n = options.event, fabric.device, options.few
    where = place_of(options).by_pixels().to(device)
    noise, model = where.noise, stepwise(where, event, **options.lookback).to(device)
    step = step_of(model, StepwiseTelescope(noise, draws=options.draws), fabric, n, options)
    points = torch.randn(n, *event, device=device)
    draws = torch.randn(options.draws, n, points[0].numel(), device=device)
    model.train()

    def plain() -> None:
        with fabric.autocast():
            heads = model(points, draws=draws)
            total = heads.at_data.sum() + heads.at_noise.sum()
        total.float().backward()
        model.zero_grad()

    floor = seconds_of(plain, device, max(5, options.steps // 4))
    print(f"a step pixel by pixel {1e3 * step:.2f} ms, {n / step:,.0f} images/s; plain {1e3 * floor:.2f} ms")
    good = figure(
        "step pixel by pixel over a plain forward and backward", step / floor, None if options.quick else 1.15
    )
    model.eval()
    with torch.no_grad():
        scored = seconds_of(lambda: model(points), device, 3)
    figure("images scored a second, pixel by pixel", n / scored, None)
    began = time.perf_counter()
    model.sample(n)
    _wait(device)
    figure("images drawn a second, pixel by pixel", n / (time.perf_counter() - began), None)
    return good


def over_waymarks(options: argparse.Namespace, fabric: Machine) -> bool:
    event, device = options.event, fabric.device
    where = place_of(options)
    model = bridged(where, event, options.bridges, **options.net)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.net(torch.zeros(1, *event))
    forward_flop = counter.get_total_flops()
    noise, model = where.to(device).noise, fast(model, device)
    step = step_of(model, Telescope(noise, options.bridges), fabric, options.batch, options)
    points = torch.randn(options.batch * (options.bridges + 1), *event, device=device)
    model.train()

    def plain() -> None:
        with fabric.autocast():
            total = model(points, heads=True).sum()
        total.float().backward()
        model.zero_grad()

    floor = seconds_of(plain, device, max(5, options.steps // 4))
    used = 3 * forward_flop * len(points)
    print(f"a bridged step {1e3 * step:.2f} ms, {len(points) / step:,.0f} images/s; plain {1e3 * floor:.2f} ms")
    print(f"{forward_flop / 1e6:.3g} MFLOP for an image forward; {used / step / 1e12:.3g} TFLOP/s in training")
    good = figure("bridged step over a plain forward and backward", step / floor, None if options.quick else 1.15)
    peak = options.peak or peak_of(device, fabric)
    print(f"{peak / 1e12:.3g} TFLOP/s of the device")
    figure("model FLOP/s utilisation of a bridged step", used / step / peak, None)
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
