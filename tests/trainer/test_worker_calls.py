"""Test that both sides of a step's calls have equal signatures: trainer/worker_group.py and the workers' classes."""

import ast
import inspect
import typing
from pathlib import Path

import pytest
from verl import DataProto
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_patches.step.batches import payloads
from verl_patches.trainer import worker_group
from verl_patches.trainer.worker_group import WorkerCalls
from verl_patches.worker.recipe_worker import RecipeWorker
from verl_patches.worker.value_worker import RecipeCriticWorker

CALLS = {name: method for name, method in vars(WorkerCalls).items() if not name.startswith("_")}
CRITIC = {"compute_values", "update_critic"}


def make_worker(name, actor=RecipeWorker):
    return RecipeCriticWorker if name in CRITIC else actor


def sent(method):
    """Return {parameter: type} of the trainer's arguments; keywords of a worker are its own, inside the process."""
    types, kinds = typing.get_type_hints(method), inspect.signature(method).parameters
    return {n: types[n] for n, p in kinds.items() if n != "self" and p.kind != p.KEYWORD_ONLY}


def answer(name, method):
    """Return the type that the trainer gets from a worker's method, by the way in which verl collects it."""
    mode, one = getattr(method, MAGIC_ATTR)["dispatch_mode"], typing.get_type_hints(method)["return"]
    if mode != Dispatch.ONE_TO_ALL:
        assert set(sent(method).values()) == {DataProto}, f"{name}: verl splits a DataProto only"
        return one
    of_ranks = [each for each in typing.get_args(one) if each is not type(None)] or [one]
    return one if one is type(None) else list[of_ranks[0]]


def differences(calls, engine_worker):
    """Return {method: (the trainer's signature, the worker's)} of those that differ."""
    found = {}
    for name, call in calls.items():
        method = getattr(engine_worker(name), name, None)
        if method is None or not hasattr(method, MAGIC_ATTR):
            found[name] = "a remote method", method
            continue
        sides = (sent(call), typing.get_type_hints(call)["return"]), (sent(method), answer(name, method))
        if sides[0] != sides[1] or list(sides[0][0]) != list(sides[1][0]):
            found[name] = sides
    return found


def test_both_sides_have_equal_names_payloads_and_answers():
    assert len(CALLS) == 14 and differences(CALLS, make_worker) == {}


class OtherName(RecipeWorker):
    update_cached = None


class OtherPayload(RecipeWorker):
    def update_cached(self, advantages: payloads.Placement) -> dict[str, typing.Any] | None: ...


@pytest.mark.parametrize("changed", [OtherName, OtherPayload])
def test_a_change_of_one_side_is_found(changed):
    """Change one side, as a control."""
    method = vars(changed)["update_cached"]
    if method is not None:
        setattr(method, MAGIC_ATTR, {"dispatch_mode": Dispatch.ONE_TO_ALL})
    assert list(differences(CALLS, lambda name: make_worker(name, changed))) == ["update_cached"]


def test_no_other_file_of_the_trainer_names_a_call_of_the_step():
    named = {
        file.name: {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        for file in Path(worker_group.__file__).parent.glob("*.py")
    }
    assert CALLS.keys() <= named.pop("worker_group.py")
    assert {file: found for file, names in named.items() if (found := names & CALLS.keys())} == {}
