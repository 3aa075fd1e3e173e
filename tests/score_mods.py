"""Score functions for tests, one of each kind: what is added, what is bent, what depends on everything, what hides."""

import torch
import triton
import triton.language as tl

import rowmax


@triton.jit
def distance(score, batch, head, row, col, strength):
    return score - strength * tl.log2(1.0 + tl.abs(row - col).to(tl.float32))


@triton.jit
def one(score, batch, head, row, col, strength):
    return 1.0


def distance_in_torch(score, batch, head, row, col, strength):
    return score - strength * torch.log2(1 + (row - col).abs().to(score.dtype))


@triton.jit
def own_cap(score, batch, head, row, col, cap):
    return cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)


@triton.jit
def own_cap_slope(score, batch, head, row, col, cap):
    e = tl.exp(-2.0 * tl.abs(score) / cap)  # 1 - tanh^2 would cancel where the cap is reached
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


def own_cap_in_torch(score, batch, head, row, col, cap):
    return cap * torch.tanh(score / cap)


# Far keys keep weights that fp32 holds: on a GPU those below 2^-126 are 0.
@triton.jit
def everything(score, batch, head, row, col, strength, bent):
    place = 0.002 * strength * (head + 1) * (row - 2 * col)
    return score * (1.0 + 0.25 * batch) + place + bent * score / (1.0 + tl.abs(score))


@triton.jit
def everything_slope(score, batch, head, row, col, strength, bent):
    side = 1.0 + tl.abs(score)
    return 1.0 + 0.25 * batch + bent / (side * side)


def everything_in_torch(score, batch, head, row, col, strength, bent):
    place = 0.002 * strength * (head + 1) * (row - 2 * col)
    return score * (1 + 0.25 * batch) + place + bent * score / (1 + score.abs())


@triton.jit
def near(score, batch, head, row, col):
    return tl.where((row - col) % 2 == 0, score, float("-inf"))


@triton.jit
def near_slope(score, batch, head, row, col):
    return tl.where((row - col) % 2 == 0, 1.0, 0.0)


def near_in_torch(score, batch, head, row, col):
    return torch.where((row - col) % 2 == 0, score, -torch.inf)


@triton.jit
def root(score, batch, head, row, col, strength):
    return score * tl.sqrt(strength * (row - col))


@triton.jit
def root_slope(score, batch, head, row, col, strength):
    return tl.sqrt(strength * (row - col))


def root_in_torch(score, batch, head, row, col, strength):
    return score * torch.sqrt(strength * (row - col))


@triton.jit
def safe_root(score, batch, head, row, col, strength):
    return score * tl.sqrt(strength * tl.abs(row - col))


@triton.jit
def safe_root_slope(score, batch, head, row, col, strength):
    return tl.sqrt(strength * tl.abs(row - col))


def safe_root_in_torch(score, batch, head, row, col, strength):
    return score * torch.sqrt(strength * (row - col).abs())


DISTANCE = rowmax.ScoreMod(distance, one, name="distance", reference=distance_in_torch)
CAP = rowmax.ScoreMod(own_cap, own_cap_slope, name="own_cap", reference=own_cap_in_torch)
EVERYTHING = rowmax.ScoreMod(everything, everything_slope, name="everything", reference=everything_in_torch)
ROOT = rowmax.ScoreMod(root, root_slope, name="root", reference=root_in_torch)  # NaN behind the diagonal
SAFE_ROOT = rowmax.ScoreMod(safe_root, safe_root_slope, name="safe_root", reference=safe_root_in_torch)
HALF = rowmax.ScoreMod(near, near_slope, name="every_other", reference=near_in_torch)
