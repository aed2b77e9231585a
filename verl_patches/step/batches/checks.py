"""Check batches and lengths: sizes that divide each other, what fits a micro batch or an engine step, filter_groups."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl_patches.errors import Check, divides, either
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.spec import RunSpec
from verl_patches.step.batches.limits import DYNAMIC_BATCH_KEYS, token_budget

_SECTION = "actor_rollout_ref"
_ROLLOUT = f"{_SECTION}.rollout"

# minutes to compile one graph, from the message of
# vllm_ascend.worker.model_runner_v1.NPUModelRunner.capture_model
GRAPH_MINUTES = 0.5, 1.5


def batch_checks(run: RunSpec) -> Iterator[Check]:
    """Check that ranks, mini batches and micro batches divide a step's responses."""
    section, train, prompts = run.verl.actor_rollout_ref, run.train, run.verl.data.train_batch_size
    n = section.rollout.n
    if run.samples:
        key = "data.train_batch_size (verl hands each rank an equal share of the prompts)"
        yield divides("prompts", prompts, run.world_size, key, "prompts a rank")
    key = f"data.train_batch_size or {_ROLLOUT}.n (train data-parallel ranks)"
    yield divides("responses", prompts * n, train.dp, key, "responses a train replica")
    for name, trained in run.trained_sections.items():
        mini, micro = trained.ppo_mini_batch_size, trained.ppo_micro_batch_size_per_gpu
        place = f"{_SECTION}.actor" if name == "actor" else name
        key = f"{place}.ppo_mini_batch_size (must divide data.train_batch_size)"
        yield divides(f"{name} mini batch", prompts, mini, key, "mini batches a step")
        key = f"{place}.ppo_mini_batch_size (responses of a mini batch over train dp)"
        yield divides(f"{name} mini batch share", mini * n, train.dp, key, "responses of a mini batch a train replica")
        key = f"{place}.ppo_micro_batch_size_per_gpu"
        if not trained.use_dynamic_bsz and micro is None:
            yield Check(f"{name} micro batch", False, f"{key} is null; verl needs it: set it, or use_dynamic_bsz=true")
        elif not trained.use_dynamic_bsz:
            yield _micro_batch_check(name, mini * n // train.dp, key, micro, "mini batch")
    passes = {"rollout": not run.recipe.train.skip_old_log_prob, "ref": run.uses_reference}
    for name in (name for name, runs in passes.items() if runs):
        key = "log_prob_micro_batch_size_per_gpu"
        micro, key = section[name][key], f"{_SECTION}.{name}.{key}"
        if section[name].get("log_prob_use_dynamic_bsz"):  # only verl 0.4.0 has that key
            continue
        if micro is None:
            yield Check(f"{name} micro batch", False, f"{key} is null; plans read it: set it")
        else:
            yield _micro_batch_check(name, prompts * n // train.dp, key, micro, "step")


def _micro_batch_check(name: str, responses: int, key: str, micro: int, whole: str) -> Check:
    """Return the Check that micro batches of `micro` responses, the value of `key`, divide a rank's of `whole`."""
    key = f"{key}, which is {micro}: each rank has {responses} response{'s' if responses != 1 else ''} of a {whole}"
    return divides(f"{name} micro batch", responses, micro, key, f"micro batches of a {whole}")


def max_num_seqs_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the graphs hold the responses of a replica; skip without max_num_seqs."""
    max_num_seqs = run.engine.get("max_num_seqs")
    if max_num_seqs is None or not run.samples:
        return
    rollout, prompts = run.verl.actor_rollout_ref.rollout, run.verl.data.train_batch_size
    responses = math.ceil(prompts * rollout.n / run.replicas)
    yield Check("max_num_seqs", True, f"{responses} responses a replica, {max_num_seqs} at once")
    running = max_num_seqs if run.validates else min(responses, max_num_seqs)  # a validation may have more responses
    sizes = run.graph_sizes
    if sizes:
        decoded = f"the {running} responses that a replica decodes at once"
        fault = f"the largest graph batch size is {max(sizes)}; expected at least {decoded}; "
        fault += f"add {running} to recipe.rollout.ascend.graph_batch_sizes, or lower max_num_seqs"
        detail = f"graphs of {', '.join(map(str, sizes))}: the largest holds {decoded}; "
        least, most = (minutes * len(sizes) for minutes in GRAPH_MINUTES)
        detail += f"{least:g} to {most:g} minutes to compile at the start"
        yield either("graph batch sizes", max(sizes) >= running, detail, fault)


def length_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the model, the engine and its step hold the longest prompt and response."""
    rollout, asked = run.verl.actor_rollout_ref.rollout, run.longest_tokens
    longest, budget = rollout.max_model_len or asked, rollout.max_num_batched_tokens
    max_positions = run.max_positions
    if longest < asked:
        text = f"{_ROLLOUT}.max_model_len is {longest}; expected at least prompt + response, {asked}"
        yield Check("lengths", False, text)
    detail = f"prompt + response {longest} tokens, model reaches {max_positions}"
    fault = f"a sequence may have {longest} tokens; expected at most the model's {max_positions} positions; lower "
    fault += f"data.max_prompt_length, data.max_response_length or {_ROLLOUT}.max_model_len"
    yield either("lengths", longest <= max_positions, detail, fault)
    detail = f"max_num_batched_tokens {budget} holds prompt + response {longest}"
    fault = (
        f"{_ROLLOUT}.max_num_batched_tokens is {budget}; expected at least prompt + response, {longest}: verl refuses "
        "enable_chunked_prefill=true below it (set it false: vLLM V1 prefills in chunks anyway), and vLLM V0 prefills "
        "a prompt in one step"
    )
    if rollout.enable_chunked_prefill or run.recipe.platform == "cpu":
        yield either("prefill", budget >= longest, detail, fault)


def micro_batch_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse settings that the tensor cache does not support, and budgets too small for dynamic micro batches."""
    yield from (Check("tensor cache", False, fault) for fault in _cache_faults(run))
    yield from (Check("micro batch", False, fault) for fault in _budget_faults(run))


def _cache_faults(run: RunSpec) -> Iterator[str]:
    """Yield reasons why a run cannot use the tensor cache, one sentence each; none if the cache is off."""
    if not run.recipe.tensor_cache.enabled:
        return
    fact = "recipe.tensor_cache.enabled is true, but"
    if run.recipe.rollout.replay is not None:
        yield f"{fact} recipe.rollout.replay gives responses to the trainer alone; set one of the two keys"
    if run.verl.actor_rollout_ref.actor.shuffle:
        yield f"{fact} {_SECTION}.actor.shuffle is true: micro batches would differ from the plan; set it false"
    if run.verl.data.return_raw_chat:
        yield f"{fact} data.return_raw_chat is true: raw prompts would not come back with the responses; set it false"


def _budget_faults(run: RunSpec) -> Iterator[str]:
    """Yield reasons why a budget of dynamic micro batches is wrong, one sentence each, with or without tensor cache."""
    longest = run.longest_tokens
    for stage, (name, switch, key) in DYNAMIC_BATCH_KEYS.items():
        budget = token_budget(run.verl.actor_rollout_ref, stage)
        if budget is not None and budget < longest:
            yield (
                f"{_SECTION}.{name}.{switch} is true with {key} {budget}: a sample may have {longest} tokens "
                "(data.max_prompt_length + data.max_response_length); raise it to that or more"
            )


def filter_groups_checks(run: RunSpec) -> Iterator[Check]:
    """Check that no other setting of the run conflicts with recipe.filter_groups; skip if it is off."""
    section, recipe, rollout = run.recipe.filter_groups, run.recipe, run.verl.actor_rollout_ref.rollout
    if section.metric is None:
        return
    faults = [
        (rollout.n < 2, f"{_ROLLOUT}.n is {rollout.n}: the responses of a prompt must differ; set 2 or more"),
        (recipe.tensor_cache.enabled, "recipe.tensor_cache.enabled is true: it cannot drop responses; set it false"),
        (recipe.rollout.replay is not None, "recipe.rollout.replay gives the responses of a step; set it to null"),
        (
            run.verl.algorithm.adv_estimator == "remax",
            "algorithm.adv_estimator is remax, whose greedy responses are those of the first batch; choose another one",
        ),
        (run.reward_models != (), "recipe.rewards has a reward model: no memory for it while vLLM is awake; remove it"),
    ]
    wrong = [text for is_wrong, text in faults if is_wrong]
    labels = [f"{REWARD_PREFIX}{part.label}" for part in run.rewards]
    if section.metric.startswith(REWARD_PREFIX) and section.metric not in labels:
        wrong.append(f"recipe.rewards gives {', '.join(labels)}; set one of them, score, or a key of a function")
    detail = (
        f"prompts whose responses differ in {section.metric}, from at most {section.max_num_gen_batches} batches a step"
    )
    yield either(
        "filter groups", not wrong, detail, f"recipe.filter_groups.metric is {section.metric}, but {'; '.join(wrong)}"
    )
