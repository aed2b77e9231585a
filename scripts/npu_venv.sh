#!/usr/bin/env bash
# Make the environment in which the real torch_npu is imported without CANN and without an NPU, or check it (two seconds).
#
#   bash scripts/npu_venv.sh [--venv DIR]
#
#   --venv DIR   the environment of scripts/setup.sh, whose torch is used (default: .venv); DIR.npu is made beside it
#
# DIR.npu holds torch_npu (44 MB to download) and stand-ins for the CANN libraries (gcc); everything else is DIR's. DIR itself
# never sees torch_npu. Prints how to run a Python in it. Only fake tensors exist there: see tests/npu/answers.c.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
base=$root/.venv
say() { printf '[npu_venv %3ss] %s\n' "$SECONDS" "$*" >&2; }
die() { printf '[npu_venv] error: %s\n' "$*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --venv) [ $# -ge 2 ] || die "--venv needs a folder"; base=$2; shift 2 ;;
        *) die "unknown option $1; see --help" ;;
    esac
done
[ -f "$base/pyvenv.cfg" ] || die "$base is not a Python environment; make one with: bash scripts/setup.sh --venv $base"
base=$(cd "$base" && pwd -P)
venv=$base.npu pins=$root/configs/requirements-npu-stubs.txt stubs=$base.npu/cann_stubs stamp=$base.npu/cann_stubs/.finished
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # else torch imports torch_npu, which needs the stubs first
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIREMENT

sources=("$root/tests/npu/make_stubs.py" "$root/tests/npu/answers.c" "$pins")
made_from() { cat "${sources[@]}" | sha256sum; "$base/bin/python" -I -c 'import sys, torch; print(sys.version, torch.__version__)'; }
check() { "$venv/bin/python" -I "$root/scripts/check_env.py" "$pins"; }
usable() { LD_LIBRARY_PATH=$stubs TASK_QUEUE_ENABLE=0 "$venv/bin/python" -I -c 'import torch_npu' 2>&1; }

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
    [ -z "$torch" ] || die "$base has another version than $pins: $torch; run: bash scripts/setup.sh --venv $base"
    # pip is the base's too; what lies outside of $venv it leaves alone
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input install -q --no-deps --no-warn-script-location -r "$pins" ||
        die "pip could not install torch_npu (its words are above): the network, or the index (PIP_INDEX_URL)"
    check >&2 || die "$venv is not what $pins says (above)"
    said=$("$venv/bin/python" -I "$root/tests/npu/make_stubs.py" "$stubs") || exit 1 # it has said why
    say "stand-ins for CANN: $said"
    said=$(usable) || die "torch_npu cannot be imported: $(tail -n 1 <<<"$said")"
    printf '%s\n' "$made" >"$stamp"
    say "ready: $venv ($(du -sm "$venv" | cut -f1) MB)"
fi
echo "LD_LIBRARY_PATH=$stubs TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0 $venv/bin/python"
