"""Our steps and samplers against those of torchebm, ebmkit and zuko.

    python benchmarks/peers.py [--quick] [--device cuda]

Everybody gets the same 3x300 SiLU network from the same weights (theirs as an energy, -log p~), the same batch of 500
points of 8gaussians, torch's Adam with learning rate 1e-3, and the same threads; calls are interleaved, medians count.
CD-10 and the chains take unadjusted Langevin steps of size 0.01, ours with a fixed step size, ebmkit's started at the
data as contrastive divergence is. The floor of CD-10 is a hand-written forward and backward of this network's score,
ten times, and the training pass that nobody can avoid: no implementation wins more than that on this machine.
Annealed importance sampling goes from the same Gaussian to what the network makes of it, over the same temperatures
with the same step sizes, ebmkit's kept as given; ours also with the pilot that finds its own, and its own leapfrog
steps. Of a temperature with MALA ebmkit evaluates the network three times, twice with its gradient, ours once; of one
with five leapfrog steps seven times, six with the gradient, ours five: little more than 1.3 is to be won there.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from figures import figure
from timing import Once, medians
from torch import Tensor, nn

from unnorm import MECO, MLP, Estimator, Gaussian, Tilted, samplers, step
from unnorm.data import toy
from unnorm.estimators import NCE, ContrastiveDivergence
from unnorm.partition import Schedule, ais

try:
    import ebm
    import zuko
    from torchebm.core import BaseModel
    from torchebm.losses import ContrastiveDivergence as TorchebmCD
    from torchebm.samplers import LangevinDynamics as TorchebmLangevin
except ImportError:
    print("install the extra: pip install -e '.[peers]'")
    sys.exit(2)

BATCH, STEP_SIZE, CD_STEPS, CHAIN_STEPS = 500, 0.01, 10, 100
AIS_CHAINS, TEMPERATURES, LEAPFROG = 128, 100, 5
HMC_STEP = (2 * STEP_SIZE) ** 0.5  # one leapfrog step of this is a Langevin step of STEP_SIZE


class Same(NamedTuple):
    """What all contestants get."""

    net: MLP
    x: Tensor
    noise: Gaussian
    device: str


class Energy(BaseModel):
    """The network as both peers want it: -log p~."""

    def __init__(self, net: nn.Module, device: str):
        super().__init__(device=device)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return -self.net(x)


def same(device: str) -> Same:
    generator = torch.Generator().manual_seed(0)
    x = toy("8gaussians").sample(BATCH, generator=generator)
    net, noise = MLP(2, generator=generator), Gaussian.fit(x)
    return Same(net.to(device), x.to(device), noise.to(device), device)


def our_step(given: Same, estimator: Estimator) -> Once:
    net, estimator = copy.deepcopy(given.net), estimator.to(given.device)
    optimizer = torch.optim.Adam([*net.parameters(), *estimator.parameters()], 1e-3)
    return lambda: step(net, estimator, optimizer, given.x)


def their_step(loss: Callable[[], Tensor], *modules: nn.Module) -> Once:
    optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], 1e-3)

    def once() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return once


def cd_steps(given: Same) -> dict[str, Once]:
    x, device = given.x, given.device
    first, second = (Energy(copy.deepcopy(given.net), device) for _ in range(2))
    langevin = TorchebmLangevin(first, step_size=STEP_SIZE, device=device)
    torchebm_cd = TorchebmCD(first, langevin, k_steps=CD_STEPS, energy_reg_weight=0.0, device=torch.device(device))
    ebmkit_cd = ebm.ContrastiveDivergence(
        ebm.LangevinDynamics(step_size=STEP_SIZE, steps=CD_STEPS), init_fn=lambda _: x
    )
    return {
        "ours": our_step(given, ContrastiveDivergence(n_steps=CD_STEPS, step_size=STEP_SIZE)),
        "torchebm": their_step(lambda: torchebm_cd(x)[0], first),
        "ebmkit": their_step(lambda: ebmkit_cd(second, x).loss, second),
        "floor": floor(given),
    }


def floor(given: Same) -> Once:
    """The least that CD-10 needs: ten scores without autograd, and one training pass over data and samples."""
    net, x = copy.deepcopy(given.net), given.x
    *hidden, last = (layer for layer in net.layers if isinstance(layer, nn.Linear))

    def score(at: Tensor) -> Tensor:
        before = []
        for layer in hidden:
            before.append(torch.addmm(layer.bias, at, layer.weight.mT))
            at = nn.functional.silu(before[-1])
        back = last.weight.expand(len(at), -1)
        for layer, value in zip(reversed(hidden), reversed(before), strict=True):
            back = torch.ops.aten.silu_backward(back, value) @ layer.weight
        return back

    def loss() -> Tensor:
        with torch.no_grad():
            at = x
            for _ in range(CD_STEPS):
                at = at + STEP_SIZE * score(at) + (2 * STEP_SIZE) ** 0.5 * torch.randn_like(at)
        log_p = net(torch.cat([x, at]))
        return log_p[BATCH:].mean() - log_p[:BATCH].mean()

    return their_step(loss, net)


def nce_steps(given: Same) -> dict[str, Once]:
    noise = torch.distributions.MultivariateNormal(given.noise.loc, scale_tril=given.noise.scale_tril)
    energy = Energy(copy.deepcopy(given.net), given.device)
    loss = ebm.NoiseContrastiveEstimation(noise).to(given.device)
    return {
        "ours": our_step(given, NCE(given.noise)),
        "ebmkit": their_step(lambda: loss(energy, given.x).loss, energy, loss),
    }


def chains(given: Same) -> dict[str, Once]:
    net, x, energy = given.net, given.x, Energy(given.net, given.device)
    langevin = TorchebmLangevin(energy, step_size=STEP_SIZE, device=given.device)
    mala = ebm.MALA(step_size=STEP_SIZE, steps=CHAIN_STEPS)
    return {
        "our ULA": lambda: samplers.run(samplers.ULA(STEP_SIZE), net, x, CHAIN_STEPS),
        "torchebm ULA": lambda: langevin.sample(x=x, n_steps=CHAIN_STEPS),
        "our MALA": lambda: samplers.run(samplers.MALA(STEP_SIZE), net, x, CHAIN_STEPS),
        "ebmkit MALA": lambda: mala.sample(energy, x),
    }


def annealings(given: Same, transition: str) -> dict[str, Once]:
    """AIS by both with transitions of the same kind, and ours with its pilot."""
    noise = given.noise
    model = Tilted(noise, given.net)
    energy = Energy(model, given.device)
    betas = torch.linspace(0, 1, TEMPERATURES + 1, dtype=torch.float64)
    sampler = samplers.HMC(HMC_STEP, 1 if transition == "mala" else LEAPFROG, jitter=0.0)
    lengths = (1 / TEMPERATURES,) * TEMPERATURES
    schedule = Schedule(tuple(betas.tolist()), (sampler,) * TEMPERATURES, lengths)
    base = torch.distributions.MultivariateNormal(noise.loc, scale_tril=noise.scale_tril)
    theirs = ebm.MALA(STEP_SIZE, 1) if transition == "mala" else ebm.HMC(HMC_STEP, LEAPFROG, 1)
    return {
        "ours": lambda: ais(model, noise, n_chains=AIS_CHAINS, schedule=schedule),
        "with pilot": lambda: ais(model, noise, n_chains=AIS_CHAINS, n_betas=TEMPERATURES, transition=transition),
        "ebmkit": lambda: ebm.ais_log_z(
            energy, (2,), base=base, n_chains=AIS_CHAINS, sampler=theirs, schedule=betas, adapt_step_size=False
        ),
    }


def flow_steps(given: Same) -> dict[str, Once]:
    flow = zuko.flows.NSF(2, transforms=3, hidden_features=(300, 300)).to(given.device)
    return {
        "our MECO": our_step(given, MECO(given.noise)),
        "zuko NSF": their_step(lambda: -flow().log_prob(given.x).mean(), flow),
    }


def compare(title: str, calls: Mapping[str, Once], rounds: int, device: str, chain_steps: int = 0) -> dict[str, float]:
    found = medians(calls, rounds, warmup=min(20, rounds // 2), device=device)
    print(f"{title}, {rounds} rounds interleaved")
    for name, milliseconds in found.items():
        speed = f"  {1000 * chain_steps / milliseconds:12,.0f} chain-steps/s" if chain_steps else ""
        print(f"  {name:14s} {milliseconds:9.3f} ms{speed}")
    return found


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--ais", action="store_true", help="only annealed importance sampling")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    given, device = same(options.device), options.device
    few, some, many = (3, 20, 100) if options.quick else (30, 200, 1000)
    print(f"3x300 MLP, batch {BATCH}, {device}, {torch.get_num_threads()} threads")
    if options.ais:
        return all(_annealed(given, few, device))
    cd = compare("CD-10 step", cd_steps(given), some, device)
    nce = compare("NCE step", nce_steps(given), many, device)
    chain = compare(f"{BATCH} chains x {CHAIN_STEPS} steps", chains(given), few, device, BATCH * CHAIN_STEPS)
    annealed = _annealed(given, few, device)
    flow = compare("training step", flow_steps(given), some, device)
    found = [
        figure(f"cd-10 step / torchebm, {device}", cd["ours"] / cd["torchebm"], 0.8),
        figure(f"cd-10 step / ebmkit, {device}", cd["ours"] / cd["ebmkit"], 0.8),
        figure(f"cd-10 floor / torchebm, {device}", cd["floor"] / cd["torchebm"]),
        figure(f"nce step / ebmkit, {device}", nce["ours"] / nce["ebmkit"], 1.0),
        figure(f"ula time / torchebm, {device}", chain["our ULA"] / chain["torchebm ULA"], 1.0),
        figure(f"mala time / ebmkit, {device}", chain["our MALA"] / chain["ebmkit MALA"], 1.0),
        figure(f"meco step / zuko nsf step, {device}", flow["our MECO"] / flow["zuko NSF"]),
    ]
    return all([*found, *annealed])


def _annealed(given: Same, rounds: int, device: str) -> list[bool]:
    found = []
    for name, dearer in (("mala", 1), ("hmc", 3)):
        title = f"AIS {name}, {AIS_CHAINS} chains x {TEMPERATURES} temperatures"
        work = AIS_CHAINS * TEMPERATURES
        times = compare(title, annealings(given, name), max(2, rounds // dearer), device, work)
        found.append(
            figure(f"ebmkit ais {name} time / ours, {device}", times["ebmkit"] / times["ours"], 1.5, at_least=True)
        )
        # Of HMC the pilot chooses another trajectory: other work, which a ratio of times says nothing about.
        if name == "mala":
            figure(f"ebmkit ais {name} time / ours with pilot, {device}", times["ebmkit"] / times["with pilot"])
    return found


if __name__ == "__main__":
    sys.exit(not main())
