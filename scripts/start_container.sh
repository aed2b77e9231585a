#!/usr/bin/env bash
# Start a container of the image of configs/Dockerfile.a3 on one Atlas A3 node, detached, with all 16 dies.
#
#   bash scripts/start_container.sh [further options of docker run]     then: docker exec -it deepseekv3-a3 bash
#   NAME=run1 IMAGE=registry/deepseekv3-a3:1 bash scripts/start_container.sh     `cluster up` calls it so on each host
#
# /data of the host is mounted; for another folder give --volume DIR:DIR. Every device is named, as in vllm-ascend's
# installation guide; for a driver that refuses otherwise give --privileged. Not run here: no NPU was available.
set -euo pipefail

name=${NAME:-deepseekv3-a3} image=${IMAGE:-deepseekv3-a3}
options=(--init --name "$name" --network host
    --shm-size 256g # a limit of /dev/shm, above the 200 GB that Ray's object store takes at most by default
    --ulimit memlock=-1 --ulimit nofile=1048576:1048576)
for device in davinci{0..15} davinci_manager devmm_svm hisi_hdc; do options+=(--device "/dev/$device"); done
# neither /home, which holds keys, nor the host's /dev/shm, which holds files of ended runs
for path in /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/sbin /usr/local/Ascend/driver /etc/localtime; do
    options+=(--volume "$path:$path:ro")
done
for path in /var/log/npu/slog/slogd /data; do options+=(--volume "$path:$path"); done
exec docker run --interactive --tty --detach "${options[@]}" "$@" "$image" /bin/bash
