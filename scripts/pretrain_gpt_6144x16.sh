#!/usr/bin/env bash
# Pretrains a GPT of hidden size 6144 with 16 layers. Everything else is set as launch_gpt.sh says.
HIDDEN_SIZE=6144 LAYERS=16 HEADS=48 exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_gpt.sh" "$@"
