#!/usr/bin/env bash
# Run one of the scripts on several hosts through ssh, one process a host.
#
#   scripts/launch_ssh.sh --hosts node0,node1 generate --ckpt_path=/shared/v3 --mesh=data=2,model=8 --interactive
#   scripts/launch_ssh.sh --hostfile hosts.txt --env NCCL_SOCKET_IFNAME=eth0 generate --ckpt_path=/shared/v3 --mesh=model=16 ...
#
#   --hosts LIST       the hosts; process 0 runs on the first
#   --hostfile FILE    the same, one a line; # begins a comment
#   --port P           process 0 waits at port P of the first host, and JAX at P + 1 (default 12355)
#   --env NAME=VALUE   set a variable on all hosts; may be repeated. Variables that begin with NCCL_, JAX_ or XLA_ go along anyway
#   --dir DIR          where the project lies on the hosts (default: as here)
#   --log_dir DIR      output of the processes other than 0; left out, a new folder in /tmp
#
# ssh must need no password. Process 0 has this terminal: it reads, prints, and hears Ctrl-C. When a process ends, all end; the exit code
# is that of the first that failed. DSV3_PYTHON names the Python of the hosts, DSV3_SSH another ssh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

hosts='' hostfile='' port=12355 dir=$root log_dir='' env=()
read_options 'hosts hostfile port dir log_dir' env "$@"
for pair in "${env[@]}"; do [[ $pair == *=* ]] || refuse "--env $pair: must be NAME=VALUE"; done
script=${script/#"$root"/"$dir"}
if [[ -n $hostfile ]]; then
  [[ -r $hostfile ]] || refuse "--hostfile $hostfile cannot be read"
  hosts=$(sed 's/#.*//' "$hostfile" | xargs | tr ' ' ,)
fi
IFS=, read -ra names <<<"$hosts"
((${#names[@]})) || refuse "give --hosts or --hostfile"
first=${names[0]#*@}
if ((${#names[@]} > 1)) && [[ $first =~ ^(localhost|127\..*|::1)$ ]]; then
  refuse "the first host is $first, which every other host takes for itself: give its name or address"
fi
while IFS='=' read -r name _; do
  if [[ $name =~ ^(NCCL|JAX|XLA)_ ]]; then env+=("$name=${!name}"); fi
done < <(env)
log_dir=${log_dir:-$(mktemp -d "${TMPDIR:-/tmp}/dsv3_XXXXXX")}
mkdir -p "$log_dir"

python=${DSV3_PYTHON:-$dir/.venv/bin/python}
other=${names[1]:-$first}
say "hosts: ${names[*]}; process 0 at $first:$port"
say "interface: $(interface_to "${other#*@}") leads from here to $other; --env NCCL_SOCKET_IFNAME=... chooses NCCL's"
for rank in "${!names[@]}"; do
  # With a terminal of its own a remote process is hung up when its ssh ends, and process 0 hears Ctrl-C.
  log=$log_dir/process_$rank.log terminal=-tt
  if ((rank == 0)); then
    log=-
    if [[ ! -t 0 ]]; then terminal=-T; fi
  fi
  say "process $rank: ${names[rank]}, all of its GPUs, output: ${log/#-/here}"
  command=$(printf '%q ' cd "$dir")"&& exec "$(printf '%q ' env "${env[@]}" PYTHONPATH="$dir" "$python" "$script" "${words[@]}" \
    --coordinator_address="$first:$port" --num_processes="${#names[@]}" --process_id="$rank")
  start "$rank" "$log" "${DSV3_SSH:-ssh}" "$terminal" -o BatchMode=yes "${names[rank]}" "$command"
done
code=0
supervise || code=$?
if ((code)); then say "output of the other processes: $log_dir"; fi
exit "$code"
