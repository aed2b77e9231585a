"""Make first updates of SFT and DPO by verl's worker on a rank, without the loop, for test_objective.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from verl import DataProto

from tests.model.megatron_model import start_parallel
from tests.model.parity import RESPONSE_START, SAMPLES
from tests.model.value_job import samples
from tests.runs import composed, worker_section
from verl_patches.spec import run_from_config
from verl_patches.step.objectives import losses
from verl_patches.step.objectives.advantages import METRIC_PREFIX, ROLE, FixedData
from verl_patches.worker.context import context
from verl_patches.worker.models import copy_source

# how far the reference's log-prob of a response is from the policy's
SHIFTS = torch.linspace(0, 6, SAMPLES).square()
DPO_OVERRIDES = ("algo=dpo", "actor_rollout_ref.actor.optim.lr=1e-12")  # moves no weight: each update is the first


def first_steps(section: DictConfig, folder: Path) -> dict[str, tuple[float, float]]:
    """Return {objective: (loss, gradient norm)} of updates of one replica's SAMPLES samples, pairs of two for DPO.

    section: actor_rollout_ref of a run with algo=dpo; SFT's actor has no reference.
    """
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(section, "actor_rollout")
    worker.init_model()
    tensors = samples(folder)
    mask = tensors["attention_mask"][:, RESPONSE_START:]
    lengths = mask.sum(1)
    assert len(mask) == SAMPLES
    log_probs = worker.compute_log_prob(DataProto.from_dict(dict(tensors))).batch["old_log_probs"]
    tensors |= {"response_mask": mask, "old_log_probs": log_probs, ROLE: torch.arange(SAMPLES) % 2}
    tensors["ref_log_prob"] = log_probs + (SHIFTS / lengths)[:, None]
    uids, found = [f"p{row // 2}" for row in range(SAMPLES)], {}
    for name in ("sft", "dpo"):
        worker.actor.config.use_kl_loss = name == "dpo"
        batch, settings = dict(tensors), replace(run_from_config(section).recipe.objective, name=name)
        fixed = FixedData(settings)
        fixed.add_advantages(batch, uids)
        data = DataProto.from_dict(batch)
        data.meta_info["global_token_num"] = tensors["attention_mask"].sum(1).tolist()
        (norm,) = worker.update_actor(data).meta_info["metrics"]["actor/grad_norm"]
        sft_loss = losses.sft((log_probs.double() * mask).sum(1), lengths).item()
        found[name] = fixed.metrics.get(f"{METRIC_PREFIX}loss", sft_loss), norm
    return found


def layouts_job(folder: Path, cases: dict[str, dict]) -> dict:
    """Return `first_steps` on line pypi by layout; cases: {name: sizes of the actor's megatron section}."""
    found = {}
    for name, sizes in cases.items():
        more = [f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in sizes.items()]
        more += [*DPO_OVERRIDES, f"actor_rollout_ref.model.path={folder / 'model'}"]
        run = composed("deepseekv3_tiny_cpu", more)
        start_parallel(run.train)
        context().scheduler = context().ledger = copy_source.value = None
        found[name] = first_steps(worker_section(run), folder)
    return found


def a3_job(folder: Path, config: DictConfig, args) -> dict:
    """Return `first_steps` on line a3."""
    return first_steps(config, folder)
