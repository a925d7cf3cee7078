"""An exchange that compresses a rank's own share too, as most shares are with many ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ckpt.exchange.exchange import AllToAllExchange, Item


class OwnShareToo(AllToAllExchange):
    """Exchange that also encodes a rank's own shard, as it does remote ones; low rank has none."""

    def _accumulate(self, items: Sequence[Item], loss_scale: float) -> Tensor:
        finite = super()._accumulate(items, loss_scale)
        for item in items:
            if item.pending is None or item.codec is None:
                continue
            left = item.own.div(loss_scale)
            if item.energy is not None:
                item.energy = item.energy + left.square().sum()
            metric, weights = self._metric_for(item), None
            if metric is not None:
                weights = metric.weights(item.name, item.shape, item.layout, left.device)
            weights = torch.ones_like(item.pending) if weights is None else weights
            weights = weights[item.layout.shard(self._me)]
            left.div_(weights)
            size, device = item.codec.packed_bytes(left.numel()), left.device
            payload = torch.empty(size, dtype=torch.uint8, device=device)
            item.codec.pack_rows(left[None], payload[None])
            item.own.zero_()
            item.codec.unpack_add_rows(payload[None], item.own, loss_scale)
            item.own.mul_(weights)
            item.pending[item.layout.shard(self._me)] = left.mul_(weights)
        return finite
