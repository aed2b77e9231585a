#!/usr/bin/env bash
# Start a container of the image of configs/Dockerfile.a3 on one node, detached, with all its dies.
#
#   bash scripts/start_container.sh [further options of docker run]     then: docker exec -it deepseekv3-a3 bash
#   NAME=run1 IMAGE=registry/deepseekv3-a3:1 bash scripts/start_container.sh     as up.sh of a job calls it on each host
#
# DIES_PER_NODE is 16, as an Atlas A3 node has; an Atlas 800T A2 node has 8. VOLUMES lists the mounted folders, HOST:CONTAINER; all
# other files are deleted with the container. Every device is named, as in vllm-ascend's installation guide; give --privileged if the
# driver refuses access. Not tested: no NPU was available.
set -euo pipefail

name=${NAME:-deepseekv3-a3} image=${IMAGE:-deepseekv3-a3} dies=${DIES_PER_NODE:-16}
# results, prepared data and the model at the configs' default places; configs/cluster_256die.yaml has the same
volumes=${VOLUMES-/data:/data /data/deepseekv3/outputs:/opt/deepseekv3/outputs
    /data/deepseekv3/deepscaler:/opt/deepseekv3/data/deepscaler /data/DeepSeek-V3:/opt/deepseekv3/DeepSeek-V3-hf}
options=(--init --name "$name" --network host
    --shm-size 256g # a limit of /dev/shm, above the 200 GB that Ray's object store takes at most by default
    --ulimit memlock=-1 --ulimit nofile=1048576:1048576)
for ((die = 0; die < dies; die++)); do options+=(--device "/dev/davinci$die"); done
for device in davinci_manager devmm_svm hisi_hdc; do options+=(--device "/dev/$device"); done
# neither /home, which holds keys, nor the host's /dev/shm, which holds files of ended runs
npu_smi=$(command -v npu-smi) || npu_smi=/usr/local/bin/npu-smi
for path in /usr/local/dcmi "$npu_smi" /usr/local/sbin /usr/local/Ascend/driver /etc/localtime; do
    options+=(--volume "$path:$path:ro")
done
for volume in /var/log/npu/slog/slogd:/var/log/npu/slog/slogd $volumes; do options+=(--volume "$volume"); done
exec docker run --interactive --tty --detach "${options[@]}" "$@" "$image" /bin/bash
