"""Weather to forecast: point vortices on the sphere, whose flow is chaotic and known exactly.

Vortices of circulation gamma_k at unit vectors x_k move with the flow that all others induce
(Bogomolov 1977, Fluid Dynamics 12, 863). With c_k = x . x_k and a core that makes it smooth,

    psi(x)  = sum_k gamma_k log(1 - c_k + core) / (4 pi)              stream function
    u(x)    = sum_k gamma_k (x_k cross x) / (4 pi (1 - c_k + core))   velocity, tangential
    zeta(x) = sum_k gamma_k (2 c_k (1 + core) - c_k^2 - 1) / (4 pi (1 - c_k + core)^2)

zeta is the Laplacian of psi. Angles are in radians, times in hours; circulations are scaled for a
root-mean-square speed of 20 m/s on the Earth.
"""

from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

CORES = (0.005, 0.02)  # (radius in radians)^2 / 2: 640 and 1270 km
SPEED = 20 * 3600 / 6.371e6  # 20 m/s, in radians an hour
SUBSTEPS = 12  # of a step, in time
FIELDS = 8  # psi and zeta with both cores, three components of velocity, and speed


class Vortices(NamedTuple):
    """Flows of K vortices."""

    position: Tensor  # [flows, K, 3] float64, unit vectors
    circulation: Tensor  # [flows, K] float64, with sum 0


def draw(flows: int, vortices: int, generator: torch.Generator) -> Vortices:
    """Return random flows at the speed above; `vortices` is even."""
    options = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    position = torch.randn(flows, vortices, 3, **options)
    position /= position.norm(dim=-1, keepdim=True)
    strength = 0.5 + torch.rand(flows, vortices // 2, **options)
    flow = Vortices(position, torch.cat([strength, -strength], dim=1))
    points = torch.randn(1000, 3, **options)
    points /= points.norm(dim=-1, keepdim=True)
    speed = velocity(flow, points.expand(flows, -1, -1)).square().sum(-1).mean(-1).sqrt()
    return flow._replace(circulation=flow.circulation * (SPEED / speed)[:, None])


def velocity(flow: Vortices, points: Tensor, core: float = CORES[0]) -> Tensor:
    """Return the velocity at points [flows, P, 3]; a vortex does not move itself."""
    cosine = points @ flow.position.mT  # [flows, P, K]
    weight = flow.circulation[:, None] / (4 * pi * (1 - cosine + core))
    return torch.linalg.cross(weight @ flow.position, points)


def step(flow: Vortices, hours: float) -> Vortices:
    """Return the flow some hours later, by the classical Runge-Kutta method."""
    x = flow.position
    dt = hours / SUBSTEPS
    for _ in range(SUBSTEPS):
        k1 = velocity(flow, x)
        k2 = velocity(flow._replace(position=x + dt / 2 * k1), x + dt / 2 * k1)
        k3 = velocity(flow._replace(position=x + dt / 2 * k2), x + dt / 2 * k2)
        k4 = velocity(flow._replace(position=x + dt * k3), x + dt * k3)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        x = x / x.norm(dim=-1, keepdim=True)
        flow = flow._replace(position=x)
    return flow


def fields(flow: Vortices, points: Tensor) -> Tensor:
    """Return the fields [flows, P, FIELDS] at unit vectors [P, 3]."""
    gamma = flow.circulation[:, None] / (4 * pi)
    cosine = points @ flow.position.mT  # [flows, P, K]
    columns = []
    for core in CORES:
        distance = 1 - cosine + core
        columns.append((gamma * distance.log()).sum(-1))
        laplacian = (2 * cosine * (1 + core) - cosine.square() - 1) / distance.square()
        columns.append((gamma * laplacian).sum(-1))
    flows = len(flow.position)
    u = velocity(flow, points.expand(flows, -1, -1), CORES[1])
    return torch.cat([torch.stack(columns, -1), u, u.norm(dim=-1, keepdim=True)], dim=-1)
