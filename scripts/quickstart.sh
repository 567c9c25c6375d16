#!/usr/bin/env bash
# From nothing to a trained GPT: environment, corpus, tokenizer, pretraining with hidden communication, resuming from a
# checkpoint, and a comparison with plain Megatron. No flags; these may be set in the environment:
#   OUTPUT=quickstart         folder for everything that is written; what an earlier run left there is replaced
#   ITERATIONS=100            training iterations
#   RESUME_ITERATIONS=10      iterations after resuming
#   VOCABULARY=1024           tokens in the vocabulary
#   CORPUS_MEGABYTES=4        text to train on
#   COMPARE=yes               anything else leaves the comparison out
#   NIC_GBPS=0.5              bandwidth of the emulated cluster's NICs in the comparison, Gbit/s
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUTPUT=${OUTPUT:-quickstart}
ITERATIONS=${ITERATIONS:-100}
RESUME_ITERATIONS=${RESUME_ITERATIONS:-10}
VOCABULARY=${VOCABULARY:-1024}
CORPUS_MEGABYTES=${CORPUS_MEGABYTES:-4}
COMPARE=${COMPARE:-yes}
NIC_GBPS=${NIC_GBPS:-0.5}
readonly PYTHON=.venv/bin/python RANKS=2 START=$SECONDS

step() {
    title=$*
    printf '\n== %s\n' "$title"
}

# Runs a command with its output in a log, of which a filter shows what matters; ends the script where it fails.
logged() {
    local log=$1 filter=$2 status=0
    shift 2
    "$@" 2>&1 | tee "$log" | "$filter" || status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] && return
    {
        echo "error: failed with exit code $status: $title"
        echo "The end of $log:"
        # Without the launcher's summary, which says only that a rank failed.
        sed '/torch\/distributed\/elastic\/multiprocessing\/api.py/,$d' "$log" | tail -n 20 | sed 's/^/  | /'
    } >&2
    exit "$status"
}

show_all() {
    sed -u 's/^/   /'
}

show_iterations() {
    local line number=' +([0-9.E+-]+)'
    local iteration="iteration$number/$number .*per iteration \(ms\):$number .*lm loss:$number"
    local validation="validation loss at iteration .* validation set .*lm loss value:$number"
    while IFS= read -r line; do
        if [[ $line =~ $iteration ]]; then
            printf '   iteration %d of %d: loss %.3f, %.0f ms an iteration\n' \
                "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]}" "${BASH_REMATCH[3]}"
        elif [[ $line == *"successfully saved checkpoint"* ]]; then
            echo "   checkpoint saved"
        elif [[ $line == *"successfully loaded checkpoint"* ]]; then
            echo "   checkpoint loaded"
        elif [[ $line =~ $validation ]]; then
            printf '   loss on text not trained on: %.3f\n' "${BASH_REMATCH[1]}"
        fi
    done
}

pretrain() {
    local log=$1
    shift
    echo "   starting $RANKS processes; the first loss comes after some seconds, each is a mean over 5 iterations"
    logged "$log" show_iterations env OMP_NUM_THREADS="$threads" \
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
        --oases-schedule oases --oases-sub-batches 2 --oases-device "$device" \
        --tensor-model-parallel-size "$RANKS" \
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 \
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 4 \
        --lr 3e-3 --lr-warmup-iters 10 --lr-decay-style cosine --train-iters $((ITERATIONS + RESUME_ITERATIONS)) \
        --clip-grad 1.0 --weight-decay 0.1 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUTPUT/tokenizer.model" \
        --data-path "$OUTPUT/corpus_text_document" --split 95,5,0 \
        --log-interval 5 --eval-interval 100000 --eval-iters 4 --save-interval 100000 \
        --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" "$@"
}

step "1/7 Environment"
bash scripts/setup.sh
mkdir -p "$OUTPUT"
# A checkpoint of an earlier run would be one of another training.
rm -rf "$OUTPUT/checkpoints" "$OUTPUT/pretrain.json" "$OUTPUT/resume.json"
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -ge "$RANKS" ]; then device=cuda; else device=cpu; fi
threads=$(($(nproc) / RANKS))
[ "$threads" -ge 1 ] || threads=1
echo "   .venv is ready; training on $device (GPUs: $gpus, CPUs: $(nproc)), output in $OUTPUT/"

step "2/7 Corpus: the sources of Python's standard library"
logged "$OUTPUT/corpus.log" show_all \
    "$PYTHON" tools/build_corpus.py --output "$OUTPUT/corpus.jsonl" --megabytes "$CORPUS_MEGABYTES"

step "3/7 Tokenizer: SentencePiece, $VOCABULARY tokens"
logged "$OUTPUT/tokenizer.log" show_all \
    "$PYTHON" tools/train_tokenizer.py --input "$OUTPUT/corpus.jsonl" --vocab-size "$VOCABULARY" \
    --output "$OUTPUT/tokenizer.model"

step "4/7 Preprocessing: text to tokens"
logged "$OUTPUT/preprocess.log" show_all \
    "$PYTHON" tools/preprocess_data.py --input "$OUTPUT/corpus.jsonl" --output-prefix "$OUTPUT/corpus" --append-eod \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUTPUT/tokenizer.model"

step "5/7 Pretraining: $RANKS-way tensor parallelism, Oases schedule; interrupted after $ITERATIONS iterations"
pretrain "$OUTPUT/pretrain.log" --exit-interval "$ITERATIONS" --oases-report "$OUTPUT/pretrain.json"
"$PYTHON" scripts/check_losses.py "$OUTPUT/pretrain.json" --vocabulary "$VOCABULARY"

step "6/7 Resuming with the same command from the checkpoint: $RESUME_ITERATIONS iterations more"
pretrain "$OUTPUT/resume.log" --oases-report "$OUTPUT/resume.json"
"$PYTHON" scripts/check_losses.py "$OUTPUT/resume.json" --resumed-from "$OUTPUT/pretrain.json"

step "7/7 Comparison with plain Megatron, on a model whose communication takes about as long as its computation"
if [ "$COMPARE" != yes ]; then
    echo "   left out (COMPARE=$COMPARE)"
else
    compare=("$PYTHON" tools/compare.py --systems megatron oases --rounds 2 --iterations 8)
    if [ "$gpus" -ge "$RANKS" ]; then
        echo "   on this machine's GPUs"
    elif [ "$(id -u)" -eq 0 ] && command -v ip >/dev/null && command -v tc >/dev/null; then
        echo "   on an emulated cluster: $RANKS servers, $NIC_GBPS Gbit/s between them"
        compare+=(--nic-gbps "$NIC_GBPS")
    else
        echo "   on this machine, where there is little communication to hide; as root and with iproute2 installed" \
            "(apt-get install iproute2) a slow network would be emulated"
    fi
    logged "$OUTPUT/compare.log" show_all env COLUMNS=110 "${compare[@]}" --json "$OUTPUT/compare.json"
fi

printf '\nDone in %d s. Logs, checkpoints and results: %s/\n' $((SECONDS - START)) "$OUTPUT"
