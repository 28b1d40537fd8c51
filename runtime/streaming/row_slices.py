"""Row slices as a step of passes: llama.cpp leaves a product out, and it is computed a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_run.runtime.decoding.driver import Step
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.row_products import RowProducts


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A slice of a matrix that a node multiplies by.

    rows: its rows.
    acquire: makes them readable.
    release: gives them back.
    stays_from: how many lent chunks must be borrowed for all of it to stay, as of `WeightStreaming.borrow`; more than
        there are, where it never does.
    """

    rows: range
    acquire: Step
    release: Step
    stays_from: int


def product_step(products: RowProducts, slices: Sequence[RowSlice], n_borrowed: Callable[[], int]) -> Step:
    """Return the step that computes a product from `slices`; those in a row that stay are multiplied by as one.

    n_borrowed: returns how many lent chunks are borrowed.
    """

    def multiply(address: int) -> None:
        first, held, n_staying = 0, list[RowSlice](), n_borrowed()
        for number, one in enumerate(slices, 1):
            one.acquire(address)
            held.append(one)
            if number == len(slices) or max(one.stays_from, slices[number].stays_from) > n_staying:
                products.multiply(address, range(first, one.rows.stop))
                first = one.rows.stop
                for done in held:
                    done.release(address)
                held.clear()
        ggml.set_compute_flag(address, True)

    return multiply


def leave_out(address: int) -> None:
    """Have llama.cpp not compute the node at `address`."""
    ggml.set_compute_flag(address, False)
