"""Both sides of the calls of a step have equal signatures: trainer/worker_group.py, and the workers' classes."""

import ast
import inspect
import pickle
import typing
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest
from verl import DataProto
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_patches.batches import payloads
from verl_patches.trainer import worker_group
from verl_patches.trainer.worker_group import WorkerCalls
from verl_patches.worker.recipe_worker import RecipeWorker
from verl_patches.worker.value_worker import RecipeCriticWorker

CALLS = {name: method for name, method in vars(WorkerCalls).items() if not name.startswith("_")}
CRITIC = {"compute_values", "update_critic"}


def worker_of(name, actor=RecipeWorker):
    return RecipeCriticWorker if name in CRITIC else actor


def sent(method):
    """{parameter: type} of what the trainer sends; keywords of a worker are its own, inside the process."""
    types, kinds = typing.get_type_hints(method), inspect.signature(method).parameters
    return {n: types[n] for n, p in kinds.items() if n != "self" and p.kind != p.KEYWORD_ONLY}


def answer(name, method):
    """The type that the trainer gets of a worker's method, by the way in which verl collects it."""
    mode, one = getattr(method, MAGIC_ATTR)["dispatch_mode"], typing.get_type_hints(method)["return"]
    if mode != Dispatch.ONE_TO_ALL:
        assert set(sent(method).values()) == {DataProto}, f"{name}: verl splits a DataProto only"
        return one
    of_ranks = [each for each in typing.get_args(one) if each is not type(None)] or [one]
    return one if one is type(None) else list[of_ranks[0]]


def differences(calls, worker_of):
    """{method: (what the trainer has, what the worker has)} of those that differ."""
    found = {}
    for name, call in calls.items():
        method = getattr(worker_of(name), name, None)
        if method is None or not hasattr(method, MAGIC_ATTR):
            found[name] = "a remote method", method
            continue
        sides = (sent(call), typing.get_type_hints(call)["return"]), (sent(method), answer(name, method))
        if sides[0] != sides[1] or list(sides[0][0]) != list(sides[1][0]):
            found[name] = sides
    return found


def test_both_sides_have_equal_names_payloads_and_answers():
    assert len(CALLS) == 14 and differences(CALLS, worker_of) == {}


class OtherName(RecipeWorker):
    update_cached = None


class OtherPayload(RecipeWorker):
    def update_cached(self, advantages: payloads.LogProbRequest) -> dict[str, typing.Any] | None: ...


class OtherParameter(RecipeWorker):
    def update_cached(self, advantages: payloads.Advantages, step: int) -> dict[str, typing.Any] | None: ...


class OtherAnswer(RecipeWorker):
    def update_cached(self, advantages: payloads.Advantages) -> payloads.LogProbs | None: ...


@pytest.mark.parametrize("changed", [OtherName, OtherPayload, OtherParameter, OtherAnswer])
def test_a_change_of_one_side_is_found(changed):
    """Control."""
    method = vars(changed)["update_cached"]
    if method is not None:
        setattr(method, MAGIC_ATTR, {"dispatch_mode": Dispatch.ONE_TO_ALL})
    assert list(differences(CALLS, lambda name: worker_of(name, changed))) == ["update_cached"]


def test_no_other_file_of_the_trainer_names_a_call_of_the_step():
    named = {
        file.name: {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        for file in Path(worker_group.__file__).parent.glob("*.py")
    }
    assert CALLS.keys() <= named.pop("worker_group.py")
    assert {file: found for file, names in named.items() if (found := names & CALLS.keys())} == {}


class Recording:
    """Stands for verl's worker group: every method returns its name and what it was given, of two ranks."""

    def __getattr__(self, name):
        return lambda *given: [(name, given), None]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_of_the_method_of_its_name(name):
    given = tuple(object() for _ in sent(CALLS[name]))
    found = CALLS[name](WorkerCalls(Recording()), *given)
    if found is not None:
        assert found[0] == (name, given)


def test_payloads_are_frozen_and_pickled_as_they_are():
    kinds = [kind for kind in vars(payloads).values() if is_dataclass(kind)]
    assert len(kinds) == 7 and all(kind.__dataclass_params__.frozen for kind in kinds)
    array = np.arange(3, dtype=np.int32)
    for given in (payloads.PromptIds(1, array, array, 4, 0, {"a": 1}), payloads.LogProbs(array, None, None)):
        found = pickle.loads(pickle.dumps(given, protocol=5))
        assert type(found) is type(given)
        for name, value in vars(given).items():
            assert np.array_equal(vars(found)[name], value)
