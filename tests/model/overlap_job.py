"""What one rank does in test_overlap.py: Megatron's real DDP, schedule and Adam of core_r0.8.0, without MindSpeed."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from megatron.training import global_vars

from tests.memory import offload_objects  # noqa: F401  (Adam in place of apex's)
from verl_patches.worker.models import overlapping_ddp
from verl_patches.worker.step_guard import StepGuard


class Net(torch.nn.Module):
    """Six linear layers of 8 x 8."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(6))

    def set_input_tensor(self, _):
        """No pipeline."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Actor:
    """verl's actor: two mini batches an update, three micro batches each."""

    def __init__(self, on, guarded=True):
        global_vars._GLOBAL_ARGS = SimpleNamespace(overlap_grad_reduce=on, ddp_bucket_size=100 if on else None)
        torch.manual_seed(3)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunk = overlapping_ddp(DistributedDataParallel)(config, ddp, Net(config))
        types = {"params_dtype": torch.float32, "use_distributed_optimizer": True}
        settings = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0, **types)
        self.actor_optimizer = get_megatron_optimizer(settings, [self.chunk])
        self.guard = StepGuard([self.chunk], self.actor_optimizer) if guarded else None
        self.events = []
        self._watch()

    def _watch(self):
        for number, layer in enumerate(self.chunk.module.layers):
            layer.weight.register_hook(lambda grad, number=number: self.events.append(f"grad {number}"))
        for bucket in (bucket for buffer in self.chunk.buffers for bucket in buffer.buckets):
            bucket.start_grad_sync = self._noting("sync", bucket.start_grad_sync)

    def _noting(self, event, original):
        def call(*args, **kwargs):
            self.events.append(event)
            return original(*args, **kwargs)

        return call

    def update_policy(self, number, bad=False):
        """Gradient norms."""
        norms = []
        for mini in range(2):
            self.events.append("mini batch")
            self.actor_optimizer.zero_grad()
            self.chunk.zero_grad_buffer()
            torch.manual_seed(1000 * number + 10 * mini + dist.get_rank())
            batches = iter(torch.randn(3, 4, 8) * (float("nan") if bad else 1))
            forward_backward_no_pipelining(
                forward_step_func=lambda data, model: (model(next(data)), lambda out: (out.pow(2).mean(), {})),
                data_iterator=batches,
                model=self.chunk,
                num_microbatches=3,
                seq_length=1,
                micro_batch_size=1,
            )
            norms.append(float(self.actor_optimizer.step()[1]))
        return norms


def found():
    """{"plain" and "overlapped": norms, weights, events of the last update; "without no_sync": its error}."""
    parallel_state.initialize_model_parallel()
    results = {}
    for name, on in (("plain", False), ("overlapped", True)):
        actor, norms = Actor(on), []
        for number in range(3):
            bad = number == 1 and dist.get_rank() == 0
            norms.append(actor.update_policy(number, bad))
            if number < 2:
                actor.events.clear()
        weights = [param.detach().clone() for param in actor.chunk.parameters()]
        results[name] = {"norms": norms, "weights": weights, "events": actor.events}
        results[name]["skipped"] = actor.guard.take()["skipped"]
    actor = Actor(True)
    actor.chunk.config.no_sync_func = contextlib.nullcontext  # as verl leaves it
    try:
        actor.update_policy(0)
        results["without no_sync"] = ""
    except AssertionError as error:
        results["without no_sync"] = str(error)
    global_vars._GLOBAL_ARGS = None
    return results
