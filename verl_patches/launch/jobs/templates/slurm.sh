set -euo pipefail
# srun gives node.sh, behind job.sh, to the standard input of one task on each node. When that of node 0 has ended, the
# others get SIGTERM; each ends what it has started and copies its logs. The exit code is the command's.
unset NODE_RANK # of an outer shell: a task's rank is SLURM_NODEID
# shellcheck source=job.sh
source "$here/job.sh"
for name in "${secrets[@]}"; do
    [ -n "${!name:-}" ] || { echo "secret $name is unset: export it where sbatch is called" >&2; exit 2; }
done
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# this is node 0: its own name may be its loopback (127.0.1.1), which the others cannot reach, so they get its address
address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
if [[ $address = 127.* && -n $interface ]]; then
    address=$(ip -4 -brief address show dev "$interface" | awk '{ sub("/.*", "", $3); print $3; exit }')
elif [[ $address = 127.* && $nodes != 1 ]]; then
    address=$(ip -4 route get "$(getent ahostsv4 "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)" |
        awk '{ print $1; exit }')" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
fi
export MASTER_ADDR=$address
cat "$here/job.sh" "$here/node.sh" | srun --ntasks-per-node=1 --wait=15 --kill-on-bad-exit=1 "${srun_options[@]}" bash -s -- serve
