"""`python -m verl_patches`: inspect patches, prepare an upstream tree, run a smoke or a training, convert weights.

Every command takes --json. Exit codes: 0 fine, 1 a problem was found, 2 wrong use or input, 128 + n ended by signal n.
"""

from __future__ import annotations

import signal
import sys

from verl_patches.errors import ConfigError, RecipeError, interruption_text, our_command

try:
    import typer

    from verl_patches.cli import cluster, contract, data, doctor, inference, inspect, patches, run, weights
    from verl_patches.processes import on_end_signals
    from verl_patches.values import printable
except ModuleNotFoundError as error:
    if __name__ != "__main__" or str(error.name).startswith("verl_patches"):
        raise
    sys.stderr.write(
        f"verl_patches: module {error.name} is not installed in {sys.executable}; expected the environment that "
        f"`{our_command('setup.sh')}` makes. Run it once, then `source .venv/bin/activate` "
        "(in an NPU image: pip install -r requirements.txt)\n"
    )
    raise SystemExit(2) from None

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
app.command("status")(patches.status_command)
app.command("explain")(contract.explain_command)
app.command("digest")(patches.digest_command)
app.command("install-prelude")(patches.install_prelude_command)
app.command("check")(contract.check_command)
app.command("smoke")(run.smoke_command)
app.command("train")(run.train_command)
app.command("plan")(run.plan_command)
app.command("doctor")(doctor.doctor_command)
app.command("bringup")(doctor.bringup_command)
app.command("config")(inspect.config_command)
app.command("reshard-plan")(inspect.reshard_plan_command)
app.command("report")(inspect.report_command)
app.command("compare")(inspect.compare_command)
app.command("samples")(inspect.samples_command)
app.command("generate")(inference.generate_command)
app.command("chat")(inference.chat_command)
app.command("eval")(inference.eval_command)
app.command("versions")(contract.versions_command)
app.add_typer(cluster.app, name="cluster")
app.add_typer(data.app, name="data")
app.add_typer(weights.app, name="weights")
EXAMPLES = {  # {command: words of two calls, which end its --help}
    "status": ("", "smoke"),
    "explain": ("update.recipe_by_default", "update.recipe_by_default --json"),
    "digest": ("", "--switches line=a3,platform=npu"),
    "install-prelude": ("", "--undo"),
    "check": ("--line pypi", "--line a3 --upstream upstream"),
    "smoke": ("", "--steps 5 --run mine layout=ep2"),
    "train": ("--config-name moonlight_16die --dry-run", "--config-name moonlight_16die recipe.run=mine"),
    "plan": ("deepseekv3_128die", "deepseekv3_128die --search --dies 256"),
    "doctor": ("deepseekv3_256die_true_weight", "deepseekv3_16die --this-node"),
    "bringup": ("deepseekv3_16die", "deepseekv3_16die --to groups"),
    "config": ("--config-name deepseekv3_16die", "--config-name deepseekv3_16die --explain"),
    "reshard-plan": ('--train "tp2 ep4 @8" --rollout "ep8 @8"', '--train "ep8 @8" --rollout "ep4 @8"'),
    "report": ("smoke", "before after"),
    "compare": ("mine outputs/gpu/verl.log", "mine reference.jsonl --limit reward=0.02"),
    "samples": ("smoke --worst", "smoke --step 2 --cut"),
    "generate": ("mine prompts.jsonl responses.jsonl", "Moonlight in.jsonl out.jsonl --temperature 0"),
    "chat": ("mine", "Moonlight --temperature 0.6"),
    "eval": ("mine scores", "Moonlight scores data.val_files=test.parquet"),
    "versions": ("", "--line a3 --upstream upstream"),
    "cluster render": ("configs/cluster_256die.yaml -o job", "job.yaml -o job --json"),
    "data build": ("data/sample.yaml", "data/sample.yaml input=mine.jsonl -o mine"),
    "data from-rollouts": ("smoke -o best", "smoke -o pairs --to pairs"),
    "weights convert": ("DeepSeek-V3 bf16 --hf", 'bf16 megatron --layout "tp2 ep4 @8"'),
    "weights export": ("mine hf", "outputs/mine/0001 hf"),
    "weights verify": ("DeepSeek-V3", "checkpoints/global_step_10"),
}
for group, names in ((app, ()), (cluster.app, ("cluster",)), (data.app, ("data",)), (weights.app, ("weights",))):
    for command in group.registered_commands:
        words = (*names, str(command.name))
        calls = (f"  {our_command(*names, words[-1])} {example}" for example in EXAMPLES[" ".join(words)])
        command.epilog = "\n".join(["\b", "Examples:", *calls])


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence on stderr and code 2, a found problem with 1.

    SIGINT, SIGTERM and SIGHUP become SystemExit with 128 + their number, so that what a command started is ended.
    """
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    before = on_end_signals(end)
    try:
        app()
    except SystemExit:
        if received:
            print(f"verl_patches: {interruption_text(received[0])}", file=sys.stderr)
        raise
    except (ConfigError, RecipeError) as error:
        print(printable(f"verl_patches: {error}", keep="\n\t"), file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
