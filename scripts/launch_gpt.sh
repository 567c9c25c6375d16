#!/usr/bin/env bash
# Starts the pretraining of a GPT by torchrun, on this node. pretrain_gpt_*.sh set the model and call it; arguments are added to
# pretrain_gpt.py's flags, and override them. To be set in the environment, with their defaults:
#   NODES=1 NODE_RANK=0                nodes of the job, and which of them this is; start the script once on each
#   MASTER_ADDR=localhost MASTER_PORT=6000   where the nodes meet: a port on node 0
#   DEVICES=                           GPUs of this node (default: all; without any, 2 ranks on the CPU)
#   TP= PP=1                           tensor-parallel degree (default: DEVICES), pipeline stages; data parallelism is the rest
#   SCHEDULE=oases SUB_BATCHES=2       or SCHEDULE=vanilla, Megatron's own
#   MICRO_BATCH=8 GLOBAL_BATCH=        samples (default: one micro-batch of each replica)
#   SEQUENCE=1024 VOCABULARY=50304     tokens
#   RECOMPUTE=full                     or none
#   PRECISION=                         bf16, fp16 or fp32 (default: bf16 on GPUs, fp32 on the CPU)
#   DATA= TOKENIZER=                   prefix of tokenised data and SentencePiece model (default: Megatron's mock data)
#   LR=3e-4 ITERATIONS=1000            learning rate, iterations
#   CHECKPOINTS= SAVE_INTERVAL=500     folder to save to and resume from (default: none)
#   SCALE=full                         or tiny: hidden size / 32, layers / 4, a short sequence, some iterations, to try it all here
#   COMPARE=no                         or yes: tools/compare.py on this node, Megatron against SCHEDULE, for ROUNDS=3 rounds,
#                                      with NIC_GBPS= on an emulated cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 2
}

: "${HIDDEN_SIZE:?is set by pretrain_gpt_*.sh}" "${LAYERS:?is set by pretrain_gpt_*.sh}" "${HEADS:?is set by pretrain_gpt_*.sh}"
PYTHON=${PYTHON:-.venv/bin/python}
command -v "$PYTHON" >/dev/null || PYTHON=python
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || fail "PYTHON=$PYTHON has no torch: run scripts/setup.sh"
if [ "$gpus" -gt 0 ]; then default_devices=$gpus default_precision=bf16; else default_devices=2 default_precision=fp32; fi
NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-6000}
DEVICES=${DEVICES:-$default_devices} PP=${PP:-1} SCHEDULE=${SCHEDULE:-oases} SUB_BATCHES=${SUB_BATCHES:-2}
TP=${TP:-$DEVICES} RECOMPUTE=${RECOMPUTE:-full} PRECISION=${PRECISION:-$default_precision}
DATA=${DATA:-} TOKENIZER=${TOKENIZER:-} LR=${LR:-3e-4} CHECKPOINTS=${CHECKPOINTS:-} SAVE_INTERVAL=${SAVE_INTERVAL:-500}
COMPARE=${COMPARE:-no} ROUNDS=${ROUNDS:-3} NIC_GBPS=${NIC_GBPS:-}
case ${SCALE:=full} in
    full) MICRO_BATCH=${MICRO_BATCH:-8} SEQUENCE=${SEQUENCE:-1024} VOCABULARY=${VOCABULARY:-50304} ITERATIONS=${ITERATIONS:-1000} ;;
    tiny)
        HIDDEN_SIZE=$((HIDDEN_SIZE / 32)) LAYERS=$(((LAYERS + 3) / 4)) HEADS=4
        MICRO_BATCH=${MICRO_BATCH:-4} SEQUENCE=${SEQUENCE:-64} VOCABULARY=${VOCABULARY:-512} ITERATIONS=${ITERATIONS:-6}
        ;;
    *) fail "SCALE=$SCALE is none of full, tiny" ;;
esac
ranks=$((NODES * DEVICES))
[ $((ranks % (TP * PP))) -eq 0 ] || fail "NODES=$NODES x DEVICES=$DEVICES = $ranks ranks are not a multiple of TP=$TP x PP=$PP"
GLOBAL_BATCH=${GLOBAL_BATCH:-$((MICRO_BATCH * ranks / (TP * PP)))}

flags=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$HEADS"
    --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE"
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --hidden-dropout 0 --attention-dropout 0 --lr "$LR" --lr-decay-style cosine --lr-warmup-fraction 0.01
    --clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 1000000
)
case $RECOMPUTE in
    full) recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
    none) recompute=() ;;
    *) fail "RECOMPUTE=$RECOMPUTE is none of full, none" ;;
esac
case $PRECISION in
    bf16 | fp16) flags+=("--$PRECISION") ;;
    fp32) ;;
    *) fail "PRECISION=$PRECISION is none of bf16, fp16, fp32" ;;
esac
if [ -n "$DATA" ]; then
    [ -n "$TOKENIZER" ] || fail "DATA=$DATA needs TOKENIZER, the SentencePiece model that it was made with"
    flags+=(--data-path "$DATA" --split 98,2,0 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
else
    flags+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCABULARY")
fi
case $SCHEDULE in
    oases) schedule=(--oases-schedule oases --oases-sub-batches "$SUB_BATCHES") ;;
    vanilla) schedule=() ;;
    *) fail "SCHEDULE=$SCHEDULE is none of oases, vanilla" ;;
esac

if [ "$COMPARE" = yes ]; then
    [ "$NODES" -eq 1 ] || fail "COMPARE=yes runs on one node, NODES is $NODES"
    exec "$PYTHON" tools/compare.py --systems megatron "oases --oases-sub-batches $SUB_BATCHES" --recompute "$RECOMPUTE" \
        --rounds "$ROUNDS" --iterations "$ITERATIONS" ${NIC_GBPS:+--nic-gbps "$NIC_GBPS"} -- "${flags[@]}" "$@"
fi
[ -z "$CHECKPOINTS" ] || flags+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL")
if [ "$gpus" -eq 0 ] && [ -z "${OMP_NUM_THREADS:-}" ]; then  # torchrun's default is one thread a rank
    threads=$(($(nproc) / DEVICES))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$DEVICES" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" pretrain_gpt.py "${flags[@]}" "${recompute[@]}" \
    "${schedule[@]}" --train-iters "$ITERATIONS" "$@"
