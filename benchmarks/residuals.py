"""Cost and bytes of keeping residuals in fewer bits, one thread, beside fp32.

    python benchmarks/residuals.py [--elements 8388608] [--repeats 9]

For each dtype, nanoseconds of CPU time an element (median of the repeats, rows timed in turn) of
`add`: `Feedback.accumulate`, what is kept plus the gradient; of a whole step: `accumulate`, `keep`,
which rounds what is left, and `commit`; and bytes an element once steps are taken. Then what comes
of 1,024 gradients of 1/1,024 of bf16's unit, added one a step beside a residual of 0.75: the share
of their sum that is there at the end, mean of a million entries (int8 rounds all entries anew each
step: one standard error is 0.03). `to nearest` is bf16 without stochastic rounding.
"""

import argparse

import torch
from _timing import Work, interleaved_medians_s

from ds_ckpt.compression import Feedback
from ds_ckpt.compression.storage import TORCH_DTYPES, QuantizedTensor, ResidualDtype


def timed_works(elements: int) -> tuple[dict[str, Work], dict[str, Feedback]]:
    gradient = torch.randn(elements)
    works: dict[str, Work] = {}
    feedbacks: dict[str, Feedback] = {}
    for dtype in TORCH_DTYPES:
        feedback = feedbacks[dtype] = Feedback(dtype=dtype)

        def add(f: Feedback = feedback) -> None:
            f.accumulate("w", gradient, 2)
            f.rollback()

        def step(f: Feedback = feedback) -> None:
            f.store("w", f.accumulate("w", gradient, 2))
            f.commit()

        step()
        works |= {f"{dtype} add": add, f"{dtype} step": step}
    works["copy fp32 to bf16"] = lambda: gradient.to(torch.bfloat16)
    return works, feedbacks


def share_kept(dtype: ResidualDtype, steps: int = 1024, elements: int = 1 << 20) -> float:
    """See the module."""
    feedback = Feedback(dtype=dtype)
    start = torch.full((elements,), 0.75)
    start[::64] = 1.0
    feedback.load_stored({"w": QuantizedTensor(start)}, 0)
    gradient = torch.full((elements,), 2.0**-8 / steps)
    gradient[::64] = 0.0
    for _ in range(steps):
        feedback.store("w", feedback.accumulate("w", gradient, 1))
        feedback.commit()
    grown = (feedback.state_dict()["w"] - start)[gradient > 0].double().mean()
    return float(grown / (steps * gradient.max().double()))


def share_kept_to_nearest(steps: int = 1024) -> float:
    residual = torch.tensor(0.75)
    for _ in range(steps):
        residual = (residual + 2.0**-8 / steps).bfloat16().float()
    return float((residual - 0.75) / 2.0**-8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    elements = arguments.elements
    works, feedbacks = timed_works(elements)
    medians_s = interleaved_medians_s(works, arguments.repeats)
    print(f"{elements} elements; torch {torch.__version__}, 1 thread; CPU ns/element")
    for dtype, feedback in feedbacks.items():
        add, step = (medians_s[f"{dtype} {what}"] / elements * 1e9 for what in ("add", "step"))
        print(
            f"{dtype}  add {add:5.2f}  whole step {step:5.2f}  "
            f"{feedback.entry_bytes:5.3f} bytes an element"
        )
    cast = medians_s["copy fp32 to bf16"] / elements * 1e9
    print(f"torch's cast of fp32 to bf16 {cast:5.2f}")
    print("\nshare of 1,024 gradients of 1/1,024 of a unit that is there at the end")
    for dtype in TORCH_DTYPES:
        print(f"{dtype:10s} {share_kept(dtype):6.3f}")
    print(f"{'to nearest':10s} {share_kept_to_nearest():6.3f}")


if __name__ == "__main__":
    main()
