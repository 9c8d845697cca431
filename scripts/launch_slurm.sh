#!/usr/bin/env bash
# Run one of the scripts on several nodes through SLURM: submitted as a job, or at once inside an allocation (salloc).
#
#   scripts/launch_slurm.sh --nodes 2 --gpus_per_node 8 generate --ckpt_path=/shared/v3 --mesh=data=2,model=8 --input_file=prompts.txt
#   salloc --nodes=2 --gpus-per-node=8 --exclusive scripts/launch_slurm.sh generate --ckpt_path=/shared/v3 --mesh=model=16 --interactive
#
#   --nodes N                nodes (default 2)
#   --gpus_per_node G        GPUs of each (default 8)
#   --processes_per_node P   processes on each (default 1, which takes all GPUs of the node; G: one per GPU)
#   --log_dir DIR            output of each process and of the job, on a disk that all nodes share (default dsv3_logs)
#   --sbatch OPTION          another option for sbatch, such as --sbatch --partition=gpu; may be repeated
#
# The processes find each other by SLURM's variables. When one ends, all end; scancel, or Ctrl-C under salloc, stops them. Variables
# such as NCCL_SOCKET_IFNAME are handed on. DSV3_PYTHON names another Python.
set -euo pipefail
# sbatch runs a copy of this file from a folder of its own.
source "${DSV3_LAUNCH_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}/scripts/launch_common.sh"

nodes=2 gpus_per_node=8 processes_per_node=1 log_dir=dsv3_logs sbatch=()
read_options 'nodes gpus_per_node processes_per_node log_dir' sbatch "$@"
mkdir -p "$log_dir"
log_dir=$(cd "$log_dir" && pwd)

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  command -v sbatch >/dev/null || refuse "sbatch was not found: this machine has no SLURM"
  export DSV3_LAUNCH_ROOT=$root
  say "log files: $log_dir/JOB.out and $log_dir/JOB_PROCESS.log"
  exec sbatch --job-name=dsv3 --nodes="$nodes" --ntasks-per-node="$processes_per_node" --gpus-per-node="$gpus_per_node" --exclusive \
    --output="$log_dir/%j.out" "${sbatch[@]}" "$root/scripts/launch_slurm.sh" --log_dir="$log_dir" \
    --processes_per_node="$processes_per_node" "$script" "${words[@]}"
fi

mapfile -t names < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
say "hosts: ${names[*]}; job $SLURM_JOB_ID"
say "devices: ${SLURM_GPUS_ON_NODE:-?} GPUs a node, $processes_per_node process(es) a node"
say "interface: $(interface_to "${names[1]:-${names[0]}}") leads from ${names[0]} to ${names[1]:-itself}; NCCL_SOCKET_IFNAME=... chooses NCCL's"
options=(--nodes="${#names[@]}" --ntasks-per-node="$processes_per_node" --kill-on-bad-exit=0 --wait=30)
if [[ -t 0 ]]; then
  options+=(--input=0 --unbuffered) # somebody sits there: process 0 has the terminal
else
  options+=(--output="$log_dir/%j_%t.log")
  say "log files: $log_dir/${SLURM_JOB_ID}_PROCESS.log"
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec srun "${options[@]}" "$(python_of)" "$script" "${words[@]}"
