#!/usr/bin/env bash
# Pretrains a GPT of hidden size 2048 with 24 layers. Everything else is set as launch_gpt.sh says.
HIDDEN_SIZE=2048 LAYERS=24 HEADS=16 exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_gpt.sh" "$@"
