"""Where everything is put together: configuration, parts, engine.

The ways in are in `entry.py`.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.config import PluginConfig
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.build import ExchangeSettings, build_exchange, describe
from ds_ckpt.exchange.schedule import ScheduledExchange
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.steps import StepLog
from ds_ckpt.zero3 import collectives, contract
from ds_ckpt.zero3.checkpoints import wrap_checkpoints
from ds_ckpt.zero3.gather import GatherSeam
from ds_ckpt.zero3.gradient import GradientSeam

log = logging.getLogger("ds_ckpt")
ATTRIBUTE = "_ds_ckpt_session"


class Session:
    """The plugin on one DeepSpeed engine, until `detach()`.

    Attributes:
        engine: DeepSpeed's engine.
        config: the checked configuration.
        counters: bytes sent by purpose and gathers, from the moment of attaching.
        summary: the line that says what is active and what it costs.
    """

    def __init__(self, engine: Any, config: PluginConfig) -> None:
        self.engine = engine
        self.config = config
        self.counters = Counters()
        self._blocks: CheckpointedBlocks | None = None
        self._gather: GatherSeam | None = None
        self._gradient: GradientSeam | None = None
        self._exchange: ScheduledExchange | None = None
        self._feedback: Feedback | None = None
        self._patches = Patches()
        self._on_drop: list[Any] = []
        """What to do for the rest of the program when the engine is dropped without `detach`."""
        try:
            self._put_together()
        except BaseException:
            self.detach()
            raise
        self._patches.set(engine, ATTRIBUTE, self)
        self.summary = self._describe()
        if torch.distributed.get_rank() == 0:
            make_heard()
            log.info(self.summary)

    def _put_together(self) -> None:
        engine, config = self.engine, self.config
        _refuse_pipeline(engine)
        stage3 = engine.zero_optimization_stage() == 3
        changed = contract.require() if stage3 else []
        collectives.listen(self.counters)
        self._on_drop.append(weakref.finalize(engine, collectives.unlisten, self.counters))
        if stage3:
            self._attach_seams(changed)
        if config.activation.policy == "block":
            scopes = [self._gather.recompute] if self._gather else []
            self._blocks = CheckpointedBlocks(engine.module, config.activation.modules, scopes)
        if config.telemetry.enabled:
            self._attach_telemetry()
        destroy = engine.destroy

        @functools.wraps(destroy)
        def detach_and_destroy() -> None:
            self.detach()
            destroy()

        self._patches.set(engine, "destroy", detach_and_destroy)

    def _attach_seams(self, changed: list[contract.Finding]) -> None:
        engine, config = self.engine, self.config
        optimizer = engine.optimizer
        if not trains(engine) or not hasattr(optimizer, "parameter_offload"):
            raise UnsupportedError(
                Problem(
                    where="engine.optimizer",
                    found=type(optimizer).__name__,
                    why="the seams lean on DeepSpeed's ZeRO-3 optimizer; without an optimizer "
                    "nothing is trained",
                    remedy="give ds_ckpt.initialize an optimizer, or name one in the JSON file",
                )
            )
        names = {p.ds_id: n for n, p in engine.module.named_parameters() if p.requires_grad}
        share = config.activation.policy != "none" and config.activation.share_gather
        self._gather = GatherSeam(optimizer, self.counters, share=share)
        for finding in changed:
            log.warning("ds_ckpt: %s: %s", finding.symbol, finding.detail)
        verify = None
        if config.compression.method != "none":
            _refuse_model_parallel(engine)
            settings = _settings(config)
            self._exchange, self._feedback = self._build(settings, self._boundary())
            if changed:
                verify, _ = self._build(ExchangeSettings("dense"))
        self._gradient = GradientSeam(
            optimizer, names, self._exchange, self.counters, verify=verify
        )
        self._on_drop.append(weakref.finalize(engine, self._gradient.lease.close))
        self._attach_state()

    def _boundary(self) -> Callable[[], bool] | None:
        """Tells the last micro-step of a step; None where every micro-step is exchanged."""
        engine, compression = self.engine, self.config.compression
        held_back = (
            compression.method != "dense"
            and compression.exchange.when == "accumulation_boundary"
            and compression.error_feedback.enabled
            and engine.gradient_accumulation_steps() > 1
            and getattr(engine._config, "managed_gradient_accumulation", True)
        )
        return engine.optimizer.is_gradient_accumulation_boundary if held_back else None

    def _build(
        self, settings: ExchangeSettings, at_boundary: Callable[[], bool] | None = None
    ) -> tuple[ScheduledExchange, Feedback | None]:
        from deepspeed import comm

        return build_exchange(
            settings,
            group=self.engine.optimizer.dp_process_group,
            all_to_all_single=comm.all_to_all_single,
            current_step=lambda: int(self.engine.global_steps),
            at_boundary=at_boundary,
        )

    def _shapes(self) -> list[tuple[str, torch.Size, int]]:
        """Name, full shape and bytes an element of every trainable parameter."""
        parameters = self.engine.module.named_parameters()
        return [(n, p.ds_shape, p.element_size()) for n, p in parameters if p.requires_grad]

    def _attach_state(self) -> None:
        group = self.engine.optimizer.dp_process_group
        dp_rank = torch.distributed.get_rank(group)
        files = ResidualFiles(
            self._feedback,
            method=self.config.compression.method,
            numels={n: shape.numel() for n, shape, _ in self._shapes()},
            dp_rank=dp_rank,
            world=torch.distributed.get_world_size(group),
        )
        wrap_checkpoints(self.engine, files, self._patches, clears=dp_rank == 0)

    def _attach_telemetry(self) -> None:
        engine, telemetry = self.engine, self.config.telemetry
        steps = StepLog(
            self.counters,
            every_n_steps=telemetry.every_n_steps,
            path=telemetry.path,
            process=torch.distributed.get_rank(),
        )
        step = engine.step

        @functools.wraps(step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            before = int(engine.global_steps)
            result = step(*args, **kwargs)
            if int(engine.global_steps) > before:
                steps.step_ended(int(engine.global_steps))
            return result

        self._patches.set(engine, "step", counted_step)

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback holds on this process now."""
        return self._feedback.nbytes if self._feedback else 0

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """Committed residual by parameter name: flat fp32, in units of the averaged gradient."""
        return self._feedback.state_dict() if self._feedback else {}

    def _describe(self) -> str:
        parts = []
        if self._blocks:
            classes = sorted({type(b.module).__name__ for b in self._blocks.blocks})
            gathers = ""
            if self._gather is not None:
                shared = self.config.activation.share_gather
                gathers = ", no extra weight gathers" if shared else ", weights gathered once more"
            parts.append(
                f"block checkpointing on {len(self._blocks.blocks)} blocks ({', '.join(classes)}): "
                f"about one more forward a step{gathers}"
            )
        if self._exchange:
            parts.append(describe(_settings(self.config), self._shapes()))
            if self._boundary() is not None:
                parts.append("one exchange an accumulated step")
            if self._feedback:
                parts.append("residuals cost 8 bytes a compressed parameter a process")
            parts.append("gradients are about a third of ZeRO-3's traffic")
        if self.config.telemetry.enabled:
            parts.append("telemetry on")
        return "ds_ckpt: " + ("; ".join(parts) if parts else "nothing is switched on")

    def detach(self) -> None:
        """Leave DeepSpeed, the engine and the model as they were found. Residuals are dropped."""
        self._patches.undo()
        if self._blocks is not None:
            self._blocks.remove()
        if self._gradient is not None:
            self._gradient.detach()
        if self._gather is not None:
            self._gather.detach()
        self._blocks = self._gradient = self._gather = None
        self._exchange = self._feedback = None
        collectives.unlisten(self.counters)
        for finalizer in self._on_drop:
            finalizer.detach()


def make_heard() -> None:
    """Let our one line through where the program has not set up logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _refuse_pipeline(engine: Any) -> None:
    """A pipeline engine checkpoints by itself and trains past `engine.step`."""
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        raise UnsupportedError(
            Problem(
                where="engine",
                found=type(engine).__name__,
                why="a pipeline checkpoints its own layers (activation_checkpoint_interval) and "
                "runs its steps inside train_batch",
                remedy="use a model that is not a PipelineModule, or remove the ds_ckpt and "
                "activation_checkpointing sections",
            )
        )


def _refuse_model_parallel(engine: Any) -> None:
    """Residuals are keyed by parameter name, which model-parallel processes share."""
    for attribute, word in (
        ("mp_world_size", "model-parallel"),
        ("sequence_parallel_size", "sequence-parallel"),
    ):
        size = getattr(engine, attribute, 1)
        if size > 1:
            raise UnsupportedError(
                Problem(
                    where=f"engine.{attribute}",
                    found=str(size),
                    why=f"{word} processes hold other slices under the same parameter name, and "
                    "residuals are kept by name",
                    remedy='set $.ds_ckpt.compression.method to "none"',
                )
            )


def _settings(config: PluginConfig) -> ExchangeSettings:
    compression = config.compression
    assert compression.method != "none"
    return ExchangeSettings(
        method=compression.method,
        density=compression.topk.density,
        values=compression.topk.values,
        selection=compression.topk.selection,
        bits=compression.quantize.bits,
        block=compression.quantize.block,
        error_feedback=compression.error_feedback.enabled,
        # sending everything has nothing to warm up for
        start_step=compression.start_step if compression.method != "dense" else 0,
        min_numel=compression.min_numel,
    )


def trains(engine: Any) -> bool:
    """Whether there is an optimizer; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")
