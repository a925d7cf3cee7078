"""Where everything is put together: configuration, parts, engine.

Every way in ends in one `Session`: `initialize`, `attach`, `install` (and with it the HF Trainer,
accelerate and `--module ds_ckpt.run`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.errors import ConfigError, DsCkptError, Problem, StateError, UnsupportedError
from ds_ckpt.exchange.build import CodecRule, ExchangeSettings, build_exchange, describe
from ds_ckpt.exchange.schedule import ScheduledExchange
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.steps import StepLog
from ds_ckpt.zero3 import collectives, contract
from ds_ckpt.zero3.gather import GatherSeam
from ds_ckpt.zero3.gradient import GradientSeam
from ds_ckpt.zero3.patch import Patches

log = logging.getLogger("ds_ckpt")
_T = TypeVar("_T")
_ATTRIBUTE = "_ds_ckpt_session"


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
        self._patches.set(engine, _ATTRIBUTE, self)
        self.summary = self._describe()
        if torch.distributed.get_rank() == 0:
            _make_heard()
            log.info(self.summary)

    def _put_together(self) -> None:
        engine, config = self.engine, self.config
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
        if not _trains(engine) or not hasattr(optimizer, "parameter_offload"):
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
        verify = None
        if config.compression.method != "none":
            settings = _settings(config)
            self._exchange, self._feedback = self._build(settings)
            self._attach_state(CodecRule(settings))
            if changed:
                for finding in changed:
                    log.warning("ds_ckpt: %s: %s", finding.symbol, finding.detail)
                verify, _ = self._build(ExchangeSettings("dense"))
        self._gradient = GradientSeam(
            optimizer, names, self._exchange, self.counters, verify=verify
        )
        self._on_drop.append(weakref.finalize(engine, self._gradient.lease.close))

    def _build(self, settings: ExchangeSettings) -> tuple[ScheduledExchange, Feedback | None]:
        from deepspeed import comm

        return build_exchange(
            settings,
            group=self.engine.optimizer.dp_process_group,
            all_to_all_single=comm.all_to_all_single,
            current_step=lambda: int(self.engine.global_steps),
        )

    def _shapes(self) -> list[tuple[str, torch.Size, int]]:
        """Name, full shape and bytes an element of every trainable parameter."""
        parameters = self.engine.module.named_parameters()
        return [(n, p.ds_shape, p.element_size()) for n, p in parameters if p.requires_grad]

    def _attach_state(self, rule: CodecRule) -> None:
        if self._feedback is None:
            return
        engine, group = self.engine, self.engine.optimizer.dp_process_group
        files = ResidualFiles(
            self._feedback,
            method=self.config.compression.method,
            numels={n: s.numel() for n, s, _ in self._shapes() if rule(n, s) is not None},
            dp_rank=torch.distributed.get_rank(group),
            world=torch.distributed.get_world_size(group),
            barrier=lambda: torch.distributed.barrier(group),
        )
        save, load = engine.save_checkpoint, engine.load_checkpoint

        @functools.wraps(save)
        def save_checkpoint(save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
            # ours first: DeepSpeed's `latest` names the tag only when all of it is there
            files.save(Path(save_dir) / tag)
            return save(save_dir, tag, *args, **kwargs)

        @functools.wraps(load)
        def load_checkpoint(load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            if tag is None:
                with suppress(FileNotFoundError):
                    tag = (Path(load_dir) / "latest").read_text().strip()
            wanted = not kwargs.get("load_module_only", False)
            state = None
            if wanted and tag is not None:
                state = _together(lambda: files.read(Path(load_dir) / str(tag)), group)
            result = load(load_dir, tag, *args, **kwargs)
            if result[0] is not None:
                files.restore(state)
            return result

        self._patches.set(engine, "save_checkpoint", save_checkpoint)
        self._patches.set(engine, "load_checkpoint", load_checkpoint)

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
            gathers = (
                "no extra weight gathers"
                if self._gather and self.config.activation.share_gather
                else "one extra gather of each weight a step"
            )
            parts.append(
                f"block checkpointing on {len(self._blocks.blocks)} blocks ({', '.join(classes)}): "
                f"about one more forward a step, {gathers}"
            )
        if self._exchange:
            parts.append(describe(_settings(self.config), self._shapes()))
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


def _make_heard() -> None:
    """Let our one line through where the program has not set up logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _together(action: Callable[[], _T], group: Any) -> _T:
    """Run `action` on every process; where it fails on one, all raise and nobody waits forever."""
    result: list[_T] = []
    failure: DsCkptError | None = None
    try:
        result.append(action())
    except DsCkptError as error:
        failure = error
    failed = torch.tensor([int(failure is not None)], device=_device())
    torch.distributed.all_reduce(failed, group=group)
    if failure is not None:
        raise failure
    if failed.item():
        raise StateError(
            Problem(
                where="the other processes of the data-parallel group",
                found=f"{int(failed.item())} of them could not read their residuals",
                why="residuals are restored on all processes or on none",
                remedy="see the error of those processes",
            )
        )
    return result[0]


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _settings(config: PluginConfig) -> ExchangeSettings:
    compression = config.compression
    assert compression.method != "none"
    return ExchangeSettings(
        method=compression.method,
        density=compression.topk.density,
        values=compression.topk.values,
        selection=compression.topk.selection,
        error_feedback=compression.error_feedback.enabled,
        # sending everything has nothing to warm up for
        start_step=compression.start_step if compression.method == "topk" else 0,
        min_numel=compression.min_numel,
    )


def session_of(engine: Any) -> Session | None:
    """The session of an engine, None where the plugin is not on it."""
    session: Session | None = vars(engine).get(_ATTRIBUTE)
    return session


def attach(engine: Any) -> Session:
    """Put the plugin on an engine that exists, as the engine's own configuration says.

    Raises:
        ConfigError: the configuration is wrong; the engine is untouched.
        UnsupportedError: the model or optimizer cannot be served; the engine is untouched.
        ContractError: this DeepSpeed has moved.
    """
    if session_of(engine) is not None:
        raise UnsupportedError(
            Problem(
                where="ds_ckpt.attach(engine)",
                found="an engine that already has a session",
                why="two sessions would compress and checkpoint twice",
                remedy="use ds_ckpt.session_of(engine), or detach() it first",
            )
        )
    return Session(engine, parse(engine._config._param_dict))


def _raw_config(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | None:
    """The configuration where `deepspeed.initialize` will look for it; None is its business."""
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None or isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path) or not Path(source).is_file():
        return None  # base64 of DeepSpeed's launcher: parsed by DeepSpeed, checked by attach
    try:
        return load_file(source)
    except ConfigError:
        text = Path(source).read_text(errors="replace")
        if "ds_ckpt" in text or "activation_checkpointing" in text:
            raise
        return None  # hjson without a word of ours: DeepSpeed's alone


def _initialize(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("args", "model", "optimizer")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    raw = _raw_config(given.get("args"), given.get("config"), given.get("config_params"))
    if raw is not None:
        parse(raw)  # every mistake is told before processes meet and memory is taken
    result = stock(*args, **kwargs)
    engine = result[0]
    checked = parse(engine._config._param_dict)
    if not (checked.active or checked.telemetry.enabled):
        return result
    if _trains(engine):
        attach(engine)
    elif torch.distributed.get_rank() == 0:
        _make_heard()
        log.warning("ds_ckpt: this engine has no optimizer (inference); nothing is switched on")
    return result


def _trains(engine: Any) -> bool:
    """Whether there is an optimizer; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with the plugin on the engine that it returns.

    Takes and returns exactly what `deepspeed.initialize` does: `(engine, optimizer, dataloader,
    lr_scheduler)`. Without a `ds_ckpt` section and without `activation_checkpointing` in the
    configuration it is plain DeepSpeed.

    Raises:
        ConfigError: every mistake in the configuration at once, before anything is built.
        UnsupportedError, ContractError: see `attach`.
    """
    import deepspeed

    stock = deepspeed.initialize
    return _initialize(getattr(stock, "__ds_ckpt_stock__", stock), args, kwargs)


def install() -> None:
    """Put the plugin into `deepspeed.initialize`, for code that calls it itself.

    The HF Trainer and accelerate look it up at call time. Idempotent; `uninstall()` takes it back.
    """
    import deepspeed

    stock = deepspeed.initialize
    if hasattr(stock, "__ds_ckpt_stock__"):
        return

    @functools.wraps(stock)
    def initialize_with_plugin(*args: Any, **kwargs: Any) -> Any:
        return _initialize(stock, args, kwargs)

    initialize_with_plugin.__ds_ckpt_stock__ = stock  # type: ignore[attr-defined]
    deepspeed.initialize = initialize_with_plugin


def uninstall() -> None:
    """Give `deepspeed.initialize` back. Engines that have a session keep it."""
    import deepspeed

    stock = getattr(deepspeed.initialize, "__ds_ckpt_stock__", None)
    if stock is not None:
        deepspeed.initialize = stock
