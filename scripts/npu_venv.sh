#!/usr/bin/env bash
# Make an environment beside that of scripts/setup.sh, with other packages of Ascend's line in it, or check it (two seconds).
#
#   bash scripts/npu_venv.sh [--a3] [--venv DIR]
#
#   --venv DIR   the environment of scripts/setup.sh (default: .venv)
#   --a3         DIR.a3: torch 2.5.1 and what else line a3's image has and DIR has not, to run tests with (1 GB to download)
#
# Without --a3 it is DIR.npu, in which the real torch_npu is imported without CANN and without an NPU; only fake tensors exist
# there: see tests/npu/answers.c. torch_npu (44 MB to download) is over DIR's torch. What a package asks of libraries that are not
# here (CANN, or CUDA for --a3) gets stand-ins (gcc). Everything else is DIR's, and DIR never sees it. Prints how to run a Python in it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
base=$root/.venv kind=npu package=torch-npu module=torch_npu
say() { printf '[npu_venv %3ss] %s\n' "$SECONDS" "$*" >&2; }
die() { printf '[npu_venv] error: %s\n' "$*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --a3) kind=a3 package=torch module=torch; shift ;;
        --venv) [ $# -ge 2 ] || die "--venv needs a folder"; base=$2; shift 2 ;;
        *) die "unknown option $1; see --help" ;;
    esac
done
[ -f "$base/pyvenv.cfg" ] || die "$base is not a Python environment; make one with: bash scripts/setup.sh --venv $base"
base=$(cd "$base" && pwd -P)
venv=$base.$kind stubs=$base.$kind/stubs stamp=$base.$kind/stubs/.finished pins=$root/configs/requirements-npu-stubs.txt
if [ "$kind" = a3 ]; then
    pins=$venv.pins
    "$base/bin/python" -I - "$root/scripts" >"$pins" <<'END' || die "$base is not ready; run: bash scripts/setup.sh --venv $base"
import sys
from importlib import metadata
sys.path.insert(0, sys.argv[1])
import lock_a3
have = {lock_a3.canonicalize_name(found.metadata["Name"]): found.version.partition("+")[0] for found in metadata.distributions()}
for name, version in lock_a3.locked_versions("3.11").items():
    if have.get(name) != version and name != "torch-npu": # which the emulated platform refuses
        print(f"{name}=={version}")
END
fi
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # else torch imports torch_npu, which needs the stubs first
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIREMENT

sources=("$root/tests/npu/make_stubs.py" "$root"/tests/npu/*answers.c "$pins")
made_from() { cat "${sources[@]}" | sha256sum; "$base/bin/python" -I -c 'import sys, torch; print(sys.version, torch.__version__)'; }
check() { "$venv/bin/python" -I "$root/scripts/check_env.py" "$pins"; }
usable() { LD_LIBRARY_PATH=$stubs TASK_QUEUE_ENABLE=0 "$venv/bin/python" -I -c "import $module" 2>&1; }

if command -v flock >/dev/null; then exec 9>"$venv.lock"; flock 9; fi
made=$(made_from) || die "$base cannot import torch; run: bash scripts/setup.sh --venv $base"
if [ "$(cat "$stamp" 2>/dev/null)" != "$made" ] || ! check >/dev/null; then
    [ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || die "$venv exists and is not a Python environment; move it away"
    rm -rf "$venv"
    say "making $venv"
    "$base/bin/python" -I -m venv --without-pip "$venv"
    site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
    torch=$(check | grep -E '^missing (torch|numpy)==' || true)
    [ "$kind" = a3 ] || [ -z "$torch" ] || die "$base has another version than $pins: $torch; run: bash scripts/setup.sh --venv $base"
    # pip is the base's too; what lies outside of $venv it leaves alone
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input install -q --no-deps --no-warn-script-location -r "$pins" ||
        die "pip could not install $package (its words are above): the network, or the index (PIP_INDEX_URL)"
    check >&2 || die "$venv is not what $pins says (above)"
    said=$("$venv/bin/python" -I "$root/tests/npu/make_stubs.py" "$stubs" "$package") || exit 1 # it has said why
    say "stand-ins: $said"
    said=$(usable) || die "$module cannot be imported: $(tail -n 1 <<<"$said")"
    printf '%s\n' "$made" >"$stamp"
    say "ready: $venv ($(du -sm "$venv" | cut -f1) MB)"
fi
echo "LD_LIBRARY_PATH=$stubs TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0 $venv/bin/python"
