"""Run verl's CriticWorker on a rank with our patches, without the loop, for test_value.py."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config
from omegaconf import DictConfig, OmegaConf
from verl import DataProto

from tests.model.megatron_model import start_parallel
from tests.model.parity import RESPONSE_START, SAMPLES
from tests.runs import composed, worker_section
from verl_patches.layout.inventory import read_model_shape
from verl_patches.memory.schedule import schedule_for_run
from verl_patches.rewards.parts import reward_parts
from verl_patches.spec import run_from_config
from verl_patches.weights.manifest import Manifest, rank_file_names
from verl_patches.weights.writer import complete_folder
from verl_patches.worker.checkpoint import WorkerCheckpoint
from verl_patches.worker.context import context


def start_critic(section: DictConfig):
    """Make the critic's worker with the layout of `section`, actor_rollout_ref; the process group exists already."""
    from verl.workers.megatron_workers import CriticWorker

    here = context()
    # as the actor's worker
    here.schedule, here.unmoved_groups = schedule_for_run(run_from_config(section), section, unified_memory=True)
    here.scheduler = here.ledger = None
    names = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs", "shuffle", "megatron", "load_weight")
    names += ("data_loader_seed", "loss_agg_mode", "optim", "checkpoint")
    own = OmegaConf.to_container(section)
    critic = {name: own["actor"][name] for name in names} | {"model": own["model"], "rollout_n": 2}
    critic |= {"cliprange_value": 0.5, "use_dynamic_bsz": False, "forward_max_token_len_per_gpu": 0}
    critic["model"]["tokenizer_path"] = own["model"]["path"]
    critic["optim"] |= {"lr": 0.01}
    worker = CriticWorker(OmegaConf.create({**critic, "run": own["run"], "ppo_micro_batch_size": None}))
    worker.init_model()
    return worker


def reward_scores(section: DictConfig, tensors: dict, folders: list[Path]) -> dict[int, torch.Tensor]:
    """Return {sample: scores [M]} of the reward models of `folders`, beside the worker of `start_critic`."""
    from verl.workers.megatron_workers import RewardModelWorker

    own = OmegaConf.to_container(section)
    reward = {"megatron": {**own["actor"]["megatron"], "param_offload": True}, "load_weight": True}
    reward |= {"micro_batch_size": None, "micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}
    reward |= {"forward_max_token_len_per_gpu": 0, "model": own["model"] | {"input_tokenizer": own["model"]["path"]}}
    entries = [{"name": "reward_model", "path": str(path)} for path in folders]
    reward["run"] = replace(
        run_from_config(section), rewards=reward_parts(OmegaConf.create({"recipe": {"rewards": entries}}))
    ).text()
    worker = RewardModelWorker(OmegaConf.create(reward))
    here = context()
    if here.schedule is not None:
        here.scheduler = here.ledger = None
        here.schedule = here.schedule.with_reward_models()
    worker.init_model()
    found = worker.compute_rm_score(DataProto.from_dict(dict(tensors))).batch["rm_scores"]
    return dict(zip(tensors["sample"].tolist(), found, strict=True))


def append_second_end(tensors: dict) -> tuple[dict, torch.Tensor]:
    """Return (samples with one more token, its place in the response [B]), as algo=rm trains on them."""
    longer = {name: tensor.clone() for name, tensor in tensors.items()}
    places = torch.stack([row.nonzero().max() for row in longer["attention_mask"]]) + 1
    rows = torch.arange(len(places))
    longer["position_ids"][rows, places] = longer["position_ids"][rows, places - 1] + 1
    longer["attention_mask"][rows, places] = longer["input_ids"][rows, places] = 1
    return longer, places - RESPONSE_START


def samples(folder: Path) -> dict[str, torch.Tensor]:
    """Return this rank's share of SAMPLES samples, rows of `reference`; `returns` is one number a sample."""
    ids, mask, position_ids = torch.load(folder / "batch.pt")
    rows = torch.arange(SAMPLES) % len(ids)
    returns = torch.linspace(-1, 1, SAMPLES)[:, None].expand(-1, ids.shape[1] - RESPONSE_START)
    tensors = {"input_ids": ids[rows], "attention_mask": mask[rows].long(), "position_ids": position_ids[rows]}
    tensors |= {"responses": ids[rows][:, RESPONSE_START:], "returns": returns, "sample": torch.arange(SAMPLES)}
    share = torch.arange(SAMPLES).chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    return {name: tensor[share].contiguous() for name, tensor in tensors.items()}


def sample_values(worker, tensors: dict) -> dict[int, torch.Tensor]:
    """Return {sample: values [R]}."""
    values = worker.compute_values(DataProto.from_dict(dict(tensors))).batch["values"]
    return dict(zip(tensors["sample"].tolist(), values, strict=True))


def run_update(worker, tensors: dict) -> dict:
    """Make one update by the critic and return verl's metrics."""
    values = torch.stack(list(sample_values(worker, tensors).values()))
    data = DataProto.from_dict({**tensors, "values": values})
    data.meta_info["global_token_num"] = tensors["attention_mask"].sum(1).tolist()
    metrics = worker.update_critic(data).meta_info["metrics"]
    worker.step_guard.take_skips()  # the report of the step
    return metrics


def score_head(worker) -> tuple[torch.Tensor, ...]:
    """Return (weight, bias) of the score head; empty on other pipeline stages."""
    named = [p for chunk in worker.critic_module for n, p in chunk.named_parameters() if "output_layer.score" in n]
    return tuple(p.detach() for p in named)


def set_head(worker, weight) -> None:
    """Set the score head to this weight and no bias."""
    for parameter in score_head(worker):
        parameter.copy_(weight if parameter.dim() == 2 else torch.zeros(1))


def answers(section: DictConfig, folder: Path, spoilt: str = "") -> dict:
    """Return gradient norms of two updates, the head before and after, values of a token's head, loss of a zero head.

    `spoilt`: "reduction" or "bias", which is left out as a negative control.
    """
    worker, tensors = start_critic(section), samples(folder)
    if spoilt == "reduction":
        get_model_config(worker.critic_module[0]).finalize_model_grads_func = None
    if spoilt == "bias":
        for chunk in worker.critic_module:
            chunk.module.output_layer.score.bias.sequence_parallel = False
    found = {"drawn": [], "lr": worker.critic_optimizer.param_groups[0]["lr"]}
    if not section.actor.megatron.param_offload:  # with offload nothing is on the device between the phases
        found["drawn"] = [t.clone() for t in score_head(worker)]
        set_head(worker, torch.load(folder / "word.pt"))
        found["as_word"] = sample_values(worker, tensors)
        longer, places = append_second_end(tensors)
        behind = sample_values(worker, longer)
        sample_places = zip(tensors["sample"].tolist(), places.tolist(), strict=True)
        found["behind"] = {sample: behind[sample][place] for sample, place in sample_places}
        set_head(worker, found["drawn"][0] if found["drawn"] else None)
    updates = [run_update(worker, tensors) for _ in range(2)]
    found["norms"] = [norm for metrics in updates for norm in metrics["critic/grad_norm"]]
    found["last_stage"] = mpu.is_pipeline_last_stage(ignore_virtual=True)
    found["head"] = [t.clone() for t in score_head(worker)] if "as_word" in found else []
    if spoilt or "as_word" not in found:
        return found
    found["scored"] = reward_scores(section, tensors, [folder / "reward_0", folder / "reward_1"])
    worker.checkpoint = worker.checkpoint or WorkerCheckpoint(worker)  # line a3 has no row checkpoint.parts here
    checkpoint = found["checkpoint"] = folder / f"critic_{run_from_config(section).line}"
    if not checkpoint.exists():
        dist.barrier()
        save(worker, checkpoint, section)
    else:  # the checkpoint was written by another layout
        worker.load_checkpoint(str(checkpoint))
    found["values"], found["norm"] = sample_values(worker, tensors), run_update(worker, tensors)["critic/grad_norm"][0]
    set_head(worker, 0.0)
    metrics = run_update(worker, tensors)
    if found["last_stage"]:
        found["loss"] = metrics["critic/vf_loss"]
    return found


def save(worker, checkpoint: Path, section: DictConfig) -> None:
    """Write a checkpoint of the critic as trainer/checkpoint.py lets workers write it."""
    layout = str(worker.checkpoint.train_state.layout)
    checkpoint.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    worker.save_checkpoint(str(checkpoint))
    worker.finish_checkpoint()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copy(Path(section.model.path, "config.json"), checkpoint)
        model, files = read_model_shape(Path(section.model.path)), tuple(rank_file_names(dist.get_world_size()))
        complete_folder(checkpoint, Manifest(model, layout, "fp32", "x", files, facts={"step": 1}))
    dist.barrier()


def layouts_job(folder: Path, cases: dict[str, tuple[str, dict]]) -> dict:
    """Return `answers` on line pypi; cases: {name: (spoilt, sizes of the actor's megatron section)}."""
    found = {}
    for name, (spoilt, sizes) in cases.items():
        more = [f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in sizes.items()]
        more += ["algo=ppo", f"actor_rollout_ref.model.path={folder / 'model'}", "recipe.memory.ledger=strict"]
        run = composed("deepseekv3_tiny_cpu", more)
        start_parallel(run.train)
        found[name] = answers(worker_section(run), folder, spoilt)
    return found


def a3_job(folder: Path, config: DictConfig, spoilt: str, args) -> dict:
    """Return `answers` on line a3; with stages the critic's section has its own list of recomputed layers."""
    if args.pipeline_model_parallel_size == 2:
        place = "model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
        OmegaConf.update(config, place, [1, 2], merge=False)
    return answers(config, folder, spoilt)
