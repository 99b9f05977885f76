"""The memory of generating answers (`fedsign.metrics.generated`): of the prompts, and of the key-value cache.

The network's own forward pass runs on the meta device over the largest batch: over the prompts, as generation begins,
and over all tokens, of which the cache is left, as it ends.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fedsign.memory.live import OTHER, LiveBytes
from fedsign.memory.step import WEIGHTS, Kernels
from fedsign.metrics.generated import GENERATED, batch_shapes
from fedsign.models.causal_lm import CausalLM
from fedsign.traits import MetricTraits
from fedsign.workload import Workload


def answers_bytes(workload: Workload, model: nn.Module) -> int:
    """Bytes beside the weights of a model on the meta device; 0 if no metric generates answers."""
    config, dataset = workload.config, workload.dataset
    if all(MetricTraits.of(name).inputs is not GENERATED for name in config.metrics):
        return 0
    evaluated = [samples for samples in (dataset.test, dataset.validation) if samples is not None]
    shapes = [shape for samples in evaluated for shape in batch_shapes(samples, config)]
    num, longest, new = max(shapes, key=lambda shape: shape[0] * (shape[1] + shape[2]), default=(0, 0, 0))
    if not num:
        return 0
    tokens = torch.zeros(num, longest + new - 1, dtype=torch.int64, device="meta")  # the last new one is not read
    live = LiveBytes()
    live.name(WEIGHTS, [*model.parameters(), *model.buffers()])
    with torch.no_grad(), torch.device("meta"), Kernels("cpu", "fused"), live:
        if not isinstance(model, CausalLM):  # it has no cache
            model.eval()(tokens)
            return live.most_of(OTHER)
        _read(model, tokens[:, :longest])
        begins = live.most_of(OTHER)
        read = _read(model, tokens)
        ends = live.current[OTHER]
    del read
    return max(begins, ends)


def _read(model: CausalLM, tokens: Tensor) -> Any:
    """The last logits and the cache of tokens [B, T]."""
    network: Any = model.network.eval()
    return network(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True, logits_to_keep=1)
