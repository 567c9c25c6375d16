#!/usr/bin/env bash
# Compares Megatron and Oases on the paper's models: compare_gpt.sh [MODEL ...], such as 4096x16; all seven by default.
# Set as launch_gpt.sh says; SCALE=tiny NIC_GBPS=0.5 tries it on an emulated cluster, as root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ $# -gt 0 ] || set -- 1024x24 2048x24 3072x24 4096x16 6144x16 8192x8 12288x4
for model in "$@"; do
    [ -f "pretrain_gpt_$model.sh" ] || {
        echo "error: there is no model $model: see scripts/pretrain_gpt_*.sh" >&2
        exit 2
    }
done
for model in "$@"; do
    echo "== $model"
    COMPARE=yes ITERATIONS=${ITERATIONS:-12} bash "pretrain_gpt_$model.sh"
done
