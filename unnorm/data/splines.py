"""Monotone rational-quadratic splines (Gregory and Delbourgo 1982), with their inverse and slope in closed form."""

from typing import NamedTuple

import numpy as np
from scipy import special
from torch import Tensor

__all__ = ["Piece", "inverse_spline", "padded_spline", "spline"]


class Piece(NamedTuple):
    """Both ends of the piece that each value is in: x, z = f(x), and the slope of f."""

    x0: Tensor
    x1: Tensor
    z0: Tensor
    z1: Tensor
    slope0: Tensor
    slope1: Tensor


def spline(piece: Piece, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and log f'(x).

    With s the slope of the chord, d0 and d1 those at the ends and t = (x - x0) / (x1 - x0),
    f = z0 + (z1 - z0) (s t^2 + d0 t (1 - t)) / (s + (d0 + d1 - 2 s) t (1 - t)).

    >>> import torch
    >>> spline(Piece(*torch.tensor([0.0, 1.0, 0.0, 2.0, 2.0, 2.0])), torch.tensor(0.25))
    (tensor(0.5000), tensor(0.6931))
    """
    width, rise = piece.x1 - piece.x0, piece.z1 - piece.z0
    chord, t = rise / width, (x - piece.x0) / width
    both = t * (1 - t)
    below = chord + (piece.slope0 + piece.slope1 - 2 * chord) * both
    z = piece.z0 + rise * (chord * t.square() + piece.slope0 * both) / below
    above = piece.slope1 * t.square() + 2 * chord * both + piece.slope0 * (1 - t).square()
    return z, 2 * (chord.log() - below.log()) + above.log()


def inverse_spline(piece: Piece, z: Tensor) -> Tensor:
    """The x with f(x) = z: the root of a quadratic, in the form that does not cancel.

    >>> import torch
    >>> piece = Piece(*torch.tensor([0.0, 1.0, 0.0, 2.0, 0.5, 3.0]))
    >>> inverse_spline(piece, spline(piece, torch.tensor(0.25))[0])
    tensor(0.2500)
    """
    width, rise = piece.x1 - piece.x0, piece.z1 - piece.z0
    chord, up = rise / width, z - piece.z0
    bend = up * (piece.slope0 + piece.slope1 - 2 * chord)
    a, b, c = rise * (chord - piece.slope0) + bend, rise * piece.slope0 - bend, -chord * up
    return piece.x0 + width * 2 * c / (-b - (b.square() - 4 * a * c).clamp_min(0).sqrt())


def padded_spline(knots: np.ndarray, cdf: np.ndarray, pieces: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Knots, F and slopes of z = Phi^-1(F), with more knots on the line before the first: the same function.

    At inner knots the slope is the weighted harmonic mean of both chords (Fritsch and Butland 1984), so it lies between
    them; at the ends it is that of the chord from the first knot to the last, which the tails go on with.
    """
    z, width = special.ndtri(cdf), np.diff(knots)
    chord = np.diff(z) / width
    whole = (z[-1] - z[0]) / (knots[-1] - knots[0])
    left, right = width[:-1] + 2 * width[1:], 2 * width[:-1] + width[1:]
    inner = (left + right) / (left / chord[:-1] + right / chord[1:])
    slope = np.concatenate([[whole], inner, [whole]])
    before = np.arange(pieces + 1 - len(knots), 0, -1) / (64 * pieces)  # at most 1/64 of the range in all
    step = before * (knots[-1] - knots[0])
    return (
        np.concatenate([knots[0] - step, knots]),
        np.concatenate([special.ndtr(z[0] - whole * step), cdf]),
        np.concatenate([np.full(len(step), whole), slope]),
    )
