#!/usr/bin/env bash
# Pretrains a GPT of hidden size 12288 with 4 layers. Everything else is set as launch_gpt.sh says.
HIDDEN_SIZE=12288 LAYERS=4 HEADS=96 exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_gpt.sh" "$@"
