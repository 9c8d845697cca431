# What launch_local.sh and launch_ssh.sh share; to be sourced, not run.
# Processes are started with `start`; `supervise` waits for all, ends the rest when one has ended, and gives the code to exit with.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
pids=() codes=() deadline=0 last_interrupt=-9
grace=15 # seconds for the others once one process has ended: they end by themselves in less

say() { printf '%s\n' "$*" >&2; }
refuse() { say "error: $*; see --help"; exit 2; }
# The comment at the top of a launcher is its help.
show_help() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$1"; exit 0; }

# python_of: the interpreter to start, the project's own if there is one.
python_of() {
  if [[ -n ${DSV3_PYTHON:-} ]]; then echo "$DSV3_PYTHON"
  elif [[ -x $root/.venv/bin/python ]]; then echo "$root/.venv/bin/python"
  else command -v python3 || refuse "no python3 was found: set DSV3_PYTHON"; fi
}

# script_of NAME: the file that NAME means.
script_of() {
  local name=$1 path
  for path in "$name" "$here/$name" "$here/$name.py"; do
    if [[ -f $path ]]; then (cd "$(dirname "$path")" && echo "$PWD/$(basename "$path")"); return; fi
  done
  refuse "no script $name: name one of scripts/, such as generate or benchmark, or a file"
}

# read_options 'NAME ...' 'LIST ...' ARGUMENTS...: --NAME VALUE or --NAME=VALUE sets the variable NAME, --LIST VALUE appends to the array
# LIST, up to the name of a script, which becomes `script`; what follows becomes `words`.
read_options() {
  local single=" $1 " several=" $2 " name
  shift 2
  while (($#)); do
    case $1 in
      --help | -h) show_help "${BASH_SOURCE[1]}" ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
      -*)
        name=${1#--}
        [[ $single$several == *" $name "* ]] || refuse "unknown option $1 (flags of the script come after its name)"
        (($# > 1)) || refuse "$1 needs a value"
        if [[ $single == *" $name "* ]]; then printf -v "$name" '%s' "$2"; else eval "$name+=(\"\$2\")"; fi
        shift 2 ;;
      *) break ;;
    esac
  done
  (($#)) || refuse "name a script to run, such as generate"
  script=$(script_of "$1")
  words=("${@:2}")
}

# start RANK LOG COMMAND...: process RANK in the background; LOG '-' leaves it this terminal and its Ctrl-C.
start() {
  local rank=$1 log=$2
  shift 2
  if [[ $log == - ]]; then
    # Shells start background commands with SIGINT ignored and without standard input; process 0 needs both.
    "$(python_of)" -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' "$@" <&0 &
  else
    "$@" </dev/null >"$log" 2>&1 &
  fi
  pids[rank]=$!
}

stop() {
  local signal=$1 rank
  for rank in "${!pids[@]}"; do
    if [[ -z ${codes[rank]:-} ]]; then kill "-$signal" "${pids[rank]}" 2>/dev/null || true; fi
  done
}

# Process 0 hears Ctrl-C itself and may only stop an answer; pressed twice within two seconds it is meant for all.
interrupted() {
  if ((SECONDS - last_interrupt <= 2 && deadline == 0)); then deadline=$((SECONDS + 10)); fi
  last_interrupt=$SECONDS
}

# supervise: wait for all; the status is that of the process that failed first (3 is what the others end with when one is lost).
supervise() {
  local rank code running first=0 killed=0
  trap interrupted INT
  trap 'say "stopping"; stop TERM; deadline=$((SECONDS + 5))' TERM HUP
  while :; do
    running=0
    for rank in "${!pids[@]}"; do
      if [[ -n ${codes[rank]:-} ]]; then continue; fi
      if kill -0 "${pids[rank]}" 2>/dev/null; then running=1; continue; fi
      code=0
      wait "${pids[rank]}" || code=$?
      codes[rank]=$code
      if ((code != 0 && (first == 0 || first == 3))); then first=$code; fi
      if ((deadline == 0)); then deadline=$((SECONDS + grace)); fi
    done
    if ((!running)); then break; fi
    if ((deadline && SECONDS >= deadline)); then
      if ((killed)); then stop KILL; else say "stopping the processes that are left"; stop TERM; fi
      killed=1 deadline=$((SECONDS + 5))
    fi
    sleep 0.2 || true
  done
  for rank in "${!codes[@]}"; do
    if ((codes[rank])); then say "process $rank ended with exit code ${codes[rank]}"; fi
  done
  if ((killed && first == 0)); then first=1; fi
  return "$first"
}

# interface_to HOST: the network card that the way to HOST takes.
interface_to() {
  local address
  address=$(getent ahosts "$1" 2>/dev/null | awk 'NR == 1 {print $1}') || true
  ip -o route get "${address:-$1}" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' | grep . || echo unknown
}

# free_port: one that nobody here listens on, nor on the next.
free_port() {
  local port
  for port in $(shuf -i 20000-29999 -n 50); do
    if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && ! (: <"/dev/tcp/127.0.0.1/$((port + 1))") 2>/dev/null; then echo "$port"; return; fi
  done
  refuse "no free port was found: name one with --port"
}
