"""Test types and bounds of values: wrong ones are refused by key before anything starts, never with another error."""

import functools
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.recipe import recipe_keys
from verl_patches.rules import RULES
from verl_patches.run.compose import compose_config
from verl_patches.run.resolve import resolve
from verl_patches.run.verl_values import check_recipe, check_verl_values, verl_types
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.values import is_secret, is_secret_value, is_secret_variable, parse_yaml, read_yaml, secret_options

TINY = "deepseekv3_tiny_cpu"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(("override", "words"), [  # one of each kind of value and of fault
    (f"{ACTOR}.optim.lr=banana", f"{ACTOR}.optim.lr is 'banana'"),
    ("data.seed=4294967296", "data.seed is 4294967296"),
    (f"{ROLLOUT}.temperature=0", r"temperature is 0; expected a number > 0: .*val_kwargs\.do_sample=false"),
    (f"{ACTOR}.shuffle=true", r"needs actor_rollout_ref\.actor\.data_loader_seed="),
    ("algorithm.kl_ctrl.type=adaptivee", "kl_ctrl.type is 'adaptivee'; expected 'fixed' or 'adaptive'"),
    *((f"recipe.ray_address={given}", "expected auto or HOST:PORT, such as 10.0.0.1:6379 or null") for given in (
        "10.0.0.1", "10.0.0.1:99999")),
    (f"{ACTOR}.loss_agg_mode=banana", "loss_agg_mode is 'banana'.*'token-mean'"),
    ("recipe.train.layers_per_stage=[3,0]", r"layers_per_stage is \[3, 0\]"),
    ("recipe.run=é", "in quotes"),
    ("~trainer.n_gpus_per_node", "trainer.n_gpus_per_node is missing"),
    (f"{ROLLOUT}.engine_kwargs=null", f"{ROLLOUT}.engine_kwargs.* is missing"),
    ("data.custom_cls.path=mine.py", "needs data.custom_cls.name"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key(override, words):
    with pytest.raises(ConfigError, match=words) as refused:
        compose_config(TINY, [override])
    assert len(re.findall(r"; expected", str(refused.value))) <= 1


def test_code_of_a_models_folder_runs_where_that_is_plainly_wanted():
    """Check the key, which line a3's verl reads without naming it in its file."""
    for key in ("actor_rollout_ref.model", "data"):
        with pytest.raises(ConfigError, match=f"{key}.trust_remote_code is 'no'"):
            compose_config("deepseekv3_256die_true_weight", [f"++{key}.trust_remote_code=no"])


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"recipe.ray_address={given}"] for given in ("auto", "10.0.0.1:6379", "head-0.ai:65535", "'[::1]:6379'")),
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/a/global_step_3"],
        [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.val_kwargs.temperature=0"],
        [f"{ACTOR}.shuffle=true", f"{ACTOR}.data_loader_seed=1"],
        [f"{ROLLOUT}.engine_kwargs.vllm=null"],
    ],
)
def test_the_alternatives_that_refusals_name_compose(overrides):
    assert compose_config(TINY, overrides)


@functools.cache
def composed(name=TINY):
    return OmegaConf.to_container(compose_config(name))


BASE = OmegaConf.to_container(OmegaConf.load(verl_config_dir() / f"{VERL_CONFIG}.yaml"))
KEYS = [*verl_types(BASE), *dict(recipe_keys())]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(), st.text(max_size=12),
    st.lists(st.one_of(st.integers(-3, 300), st.text(max_size=4)), max_size=4), st.just({}), st.just({"a": 1}),
)  # fmt: skip


def with_value(key, value):
    """Return a copy of the composed configuration with another value."""
    config = OmegaConf.create(composed())
    OmegaConf.update(config, key, value, merge=False, force_add=True)
    return OmegaConf.to_container(config)


def check(config):
    """Check a composed configuration as a command does."""
    check_recipe(config["recipe"])
    check_verl_values(config, BASE)
    return list(RULES.checks(resolve(OmegaConf.create(config), platform_rows("cpu"))))


def test_the_keys_are_many_and_the_configuration_passes():
    assert len(KEYS) > 130 and all(item.ok for item in check(with_value("trainer.nnodes", 1)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_is_refused_or_checked(key, value):
    try:
        assert check(with_value(key, value))
    except ConfigError as error:
        assert str(error)


SECRET_NAMES = """
HF_TOKEN HFTOKEN TOKEN APIKEY WANDB_API_KEY KEY SSH_KEY BASIC_AUTH DB_PASS PASSWORD PGPASSWORD REGISTRY_PASSWD MYSQL_PWD
GITHUB_PAT AWS_SECRET_ACCESS_KEY CLIENT_SECRET CREDENTIALS accessKey hfToken HF_TOKEN_2 SSH_KEY2 hf_token token auth
api_key clientSecret AWS_ACCESS_KEY_ID WANDBKEY SESSION_COOKIE OPENAIKEY wandb_token wandb_key api_token bearer_token
license_key hub_key hf_key db_pass db_pwd x_auth cookie passwords secret_value my_password_prod gitlab_token
swanlab_token sas_token account_key encryption_key
"""
OTHER_NAMES = """
MAX_TOKEN_NUM KEY_CACHE_SIZE AUTH_MODE TOKENIZERS_PARALLELISM MAX_TOKENS PATH PWD COMPASS BYPASS AUTHOR MONKEY
HF_TOKEN_PATH SSH_AUTH_SOCK KEY_FILE prompt_key reward_fn_key eos_token tokenizer num_key_value_heads key pass_at_k
PasswordAuthentication val_pass_k max_token pad_token num_tokens OLDPWD author
"""


def test_secrets_are_known_by_name():
    assert [name for name in SECRET_NAMES.split() if not is_secret_variable(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_variable(name)] == []
    assert is_secret("hf_token", "x") and not any(is_secret("hf_token", value) for value in ("", 3, None, "$HF_TOKEN"))
    assert not is_secret("n_pass", "8") and not is_secret("use_auth_token", "true") and is_secret("password", "8")


def test_secrets_are_known_by_their_form():
    forms = [
        "hf_" + "a" * 34,
        "sk-" + "a1" * 20,
        "ghp_" + "a" * 36,
        "AKIA" + "A1" * 8,
        "-----BEGIN RSA PRIVATE KEY-----",
    ]
    forms += ["https://me:word@host/x", "glpat-" + "a" * 20, "xoxb-1234567890-a", "eyJ" + "a" * 12 + ".eyJ" + "b" * 12]
    assert all(is_secret_value(text) and is_secret_value(f"x={text}") and is_secret("model", text) for text in forms)
    others = ["0" * 40, "https://host:80/x", "https://me@host/x", "hf_model", "sk-learn", "git@github.com:a/b", "eyJ"]
    others += ["/home/sk-deepseek-v3-rl-training-01/m", "sk-deepseek-v3-rl-training-01/m", "risk-" + "a1" * 20]
    assert not any(is_secret_value(text) for text in others)


def test_secrets_are_found_among_the_words_of_a_command():
    words = "run -e HFTOKEN=x --api-key y --password=z data.prompt_key=prompt -e WANDB_API_KEY --export=A=b,DB_PASS=c"
    assert sorted(secret_options(words.split())) == ["DB_PASS", "HFTOKEN", "api-key", "password"]
    assert secret_options(["bash", "-ec", "login --token hf_" + "a" * 24]) == ["a word"]
    assert secret_options(["-o", "PasswordAuthentication=no", "bash", "-c", "A_TOKEN=$(cat f) train --pass 8"]) == []


@pytest.mark.parametrize(
    "text", [b"a: [1, 2\n", b"a: 1\nb: 2\na: 3\n", b"a: caf\xe9\n", b"- a\n", b"a: 1\n---\nb: 2\n"]
)
def test_a_file_that_is_no_yaml_is_refused_in_one_line_by_name(tmp_path, text):
    (tmp_path / "bad.yaml").write_bytes(text)
    for path in (tmp_path / "bad.yaml", tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: expected a YAML file of KEY: VALUE, found.*$"):
            read_yaml(path)


def test_yaml_is_read_as_hydra_reads_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}
    path.write_text("a: 1e3\nb: 2001-01-01\nc: no\nd: ~\n")
    assert read_yaml(path) == {"a": 1000.0, "b": "2001-01-01", "c": False, "d": None}
    assert parse_yaml("a: 1\n---\nb: 2\n", "f") == [{"a": 1}, {"b": 2}] and parse_yaml("", "f") == []
    with pytest.raises(ConfigError, match="^f: expected YAML, found: .*duplicate key a.*$"):
        parse_yaml("a: 1\na: 3\n", "f")
