#!/usr/bin/env bash
# Pretrains a GPT of hidden size 3072 with 24 layers. Everything else is set as launch_gpt.sh says.
HIDDEN_SIZE=3072 LAYERS=24 HEADS=24 exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_gpt.sh" "$@"
