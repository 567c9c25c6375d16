#!/usr/bin/env bash
# Pretrains a GPT of hidden size 8192 with 8 layers. Everything else is set as launch_gpt.sh says.
HIDDEN_SIZE=8192 LAYERS=8 HEADS=64 exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_gpt.sh" "$@"
