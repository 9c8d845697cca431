#!/usr/bin/env bash
# Run one of the scripts as several processes of this machine.
#
#   scripts/launch_local.sh --processes 2 generate --ckpt_path=DIR --mesh=model=8 --interactive
#   scripts/launch_local.sh --processes 8 benchmark model --random_weights --config=configs/deepseek_v3_671b.json --mesh=model=8
#   scripts/launch_local.sh --processes 2 --cpu_devices 4 generate --ckpt_path=DIR --mesh=model=8 --input_file=prompts.txt
#
#   --processes N     how many; left out, one per GPU
#   --gpus LIST       the GPUs to share out, such as 0,1,2,3; left out, CUDA_VISIBLE_DEVICES or all
#   --cpu_devices K   no GPUs: K fake devices of the CPU for each process
#   --port P          process 0 waits at port P, and JAX at P + 1; left out, free ones
#   --log_dir DIR     output of the processes other than 0; left out, a new folder in /tmp
#
# Process 0 has this terminal: it reads, prints, and hears Ctrl-C. When a process ends, all end; the exit code is that of the first
# that failed. DSV3_PYTHON names another Python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

processes='' gpus=${CUDA_VISIBLE_DEVICES:-} cpu_devices='' port='' log_dir=''
read_options 'processes gpus cpu_devices port log_dir' '' "$@"

if [[ -z $cpu_devices ]]; then
  if [[ -z $gpus ]]; then gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,) || true; fi
  [[ -n $gpus ]] || refuse "no GPU was found: --cpu_devices K runs on the CPU"
  IFS=, read -ra ids <<<"$gpus"
  processes=${processes:-${#ids[@]}}
fi
[[ ${processes:-2} =~ ^[1-9][0-9]*$ && ${cpu_devices:-1} =~ ^[1-9][0-9]*$ ]] || refuse "--processes and --cpu_devices must be positive integers"
processes=${processes:-2}
if [[ -z $cpu_devices ]] && ((${#ids[@]} % processes)); then refuse "${#ids[@]} GPUs ($gpus) do not divide among $processes processes"; fi
port=${port:-$(free_port)}
log_dir=${log_dir:-$(mktemp -d "${TMPDIR:-/tmp}/dsv3_XXXXXX")}
mkdir -p "$log_dir"

say "host: $(hostname), $processes processes, process 0 at 127.0.0.1:$port"
say "interface: lo"
python=$(python_of)
for ((rank = 0; rank < processes; rank++)); do
  if [[ -n $cpu_devices ]]; then
    devices=(JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:-} --xla_force_host_platform_device_count=$cpu_devices")
    shown="$cpu_devices CPU devices"
  else
    each=$((${#ids[@]} / processes))
    shown=$(IFS=,; echo "${ids[*]:rank*each:each}")
    devices=("CUDA_VISIBLE_DEVICES=$shown")
    shown="GPUs $shown"
  fi
  log=$log_dir/process_$rank.log
  if ((rank == 0)); then log=-; fi
  say "process $rank: $shown, output: ${log/#-/here}"
  start "$rank" "$log" env "${devices[@]}" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" "$script" "${words[@]}" \
    --coordinator_address="127.0.0.1:$port" --num_processes="$processes" --process_id="$rank"
done
code=0
supervise || code=$?
if ((code)); then say "output of the other processes: $log_dir"; fi
exit "$code"
