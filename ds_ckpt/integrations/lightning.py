"""Strategy of Lightning: `import ds_ckpt.integrations.lightning`, `Trainer(strategy="ds_ckpt")`."""

from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

from ds_ckpt.engine.entry import install


class LightningStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy; a configuration without a section gets `"auto"`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config.setdefault("ds_ckpt", "auto")
        install()


if "ds_ckpt" not in StrategyRegistry:
    StrategyRegistry.register("ds_ckpt", LightningStrategy, "ZeRO stage 3 with ds_ckpt", stage=3)
