"""Measure the host's CPU ms of a decode step of vLLM V1 with vllm-ascend, with and without our patches. By hand:

    python tests/benchmarks/decode_step.py --upstream upstream [--batch 64] [--tokens 200] [--profile FILE]

Prints JSON: a list of figures, each with `value`, `bound` and `peer`; `responses equal` fails where tokens or log-probs
differ. Exits 1 where a bound is exceeded. One process on platform npu_emulated, without an NPU: the model's forward
does nothing and its logits have 16 words, so that what is left is Python and the launches of the sampler's operators.
CPU time of the process, not seconds: other work on the machine hardly counts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from report import ROOT, argument_parser, figure, print_report

from tests.conftest import emulated_npu
from tests.ranks import Ranks
from verl_patches.model.tiny import make_tiny_model

VARIABLES = {
    "VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ENABLE_FIX_ROUTE": "0",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE": "1",
    "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}  # fmt: skip


def main() -> int:
    parser = argument_parser(__doc__, batch=64, tokens=200, repeats=3)
    parser.add_argument("--upstream", type=Path, default=ROOT / "upstream")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    if not (engine := (args.upstream / "vllm-ascend").resolve()).is_dir():
        parser.error(f"{engine}: not a folder; expected a checkout of vllm-ascend, which fetch_upstream.sh makes")
    shape = json.loads((ROOT / "configs/model/deepseekv3_tiny_256experts.json").read_text())
    trees = {"VERL_PATCHES": emulated_npu(), "PYTHONPATH": str(engine)}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", overrides=shape | {"num_hidden_layers": 1})
        profile = args.profile and str(args.profile.resolve())
        with Ranks(1, {**os.environ, **VARIABLES, **trees}, prelude=True, backend=None) as ranks:
            job = "tests.rollout.decode_step:main"
            (found,) = ranks.run(job, str(model), args.batch, args.tokens, args.repeats, profile)
    before, after = found["before"], found["after"]
    return print_report(
        "decode_step",
        [
            figure("CPU time of a decode step without the rows", round(before, 3), "ms", None),
            figure("CPU time of a decode step", round(after, 3), "ms", None, peer=round(before, 3)),
            figure("ratio", round(after / before, 3), "", 0.6, peer=1),
            figure("responses equal", found["same"], "", None, fine=found["same"]),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
