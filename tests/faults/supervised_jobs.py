#!/usr/bin/env python3
"""`sluice run` with shell scripts as jobs: restarts, signals, hosts, and that nothing of a job is left.

    tests/faults/supervised_jobs.py [--case NAME] [--build DIR]

After each case no process that the job started may live.
"""

import functools
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

from harness import PATIENCE, POLL, Job, Setup, Violation, arguments, main, require, run_cases

USAGE, DATA, STOPPED = 2, 3, 12
RETRIED = (1, 9, 10, 11, 134, 135, 136, 137, 138, 139, 205, 255)
FINAL = (0, 2, 3, 4, 5, 6, 7, 8, 12, 13, 70, 127, 143)
REPORT = 'echo "sluice-event {\\"event\\":\\"hang\\",\\"kind\\":\\"lost\\",\\"hosts\\":[\\"%s\\"]}" >&2; '
IGNORES = "trap '' USR1 TERM; "  # children inherit that


class Run:
    """A supervisor with a script as its job. $DIR is a folder of the case; `starts` there has a line a start."""

    def __init__(self, setup, name, script, *options, words=None, environment=None, **others):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=setup.folder))
        self.starts_file = self.folder / "starts"
        script = "echo start >> $DIR/starts; " + script
        self.job = Job([*others.pop("wrap", ()), setup.sluice, "run", "--pause", "0", *options, "--",
                        *(words or ["sh", "-c", script, "job"])],
                       {"DIR": str(self.folder), **(environment or {})}, self.folder / "output")

    def starts(self):
        try:
            return len(self.starts_file.read_text().splitlines())
        except FileNotFoundError:
            return 0

    def wait_for_file(self, name):
        return self.job.wait_for((self.folder / name).exists, f"no file {name}")

    def expect(self, code, *parts, starts=None):
        output = self.job.expect(code, *parts)
        if starts is not None:
            require(self.starts() == starts, f"{self.starts()} starts instead of {starts}\n{self.job.tail()}")
        return output

    def signal(self, number):
        self.job.signal(self.job.process.pid, number)


def exit_codes(setup):
    for code in FINAL:
        Run(setup, f"final-{code}", f"exit {code}").expect(code, starts=1)
    for code in RETRIED:
        Run(setup, f"retried-{code}", f"exit {code}", "--restarts", "1").expect(
            code, rf"exit code {code}: .*; restart 1 in 0 s", r"giving up: exit code .* all that --restarts allows",
            starts=2)


def killed_launcher(setup):
    for number in (signal.SIGKILL, signal.SIGSEGV):
        Run(setup, f"killed-{number}", f"kill -{int(number)} $$", "--restarts", "1").expect(
            128 + number, rf"the launcher killed by {number.name}", starts=2)


def no_restarts(setup):
    output = Run(setup, "none", "exit 11", "--restarts", "0").expect(11, r"giving up: .*--restarts 0", starts=1)
    require("1 restart" not in output and "0 restart" not in output, output)


def always_fails(setup):
    Run(setup, "always", "exit 11").expect(
        11, r"restart 2 in 0 s", r"giving up: exit code 11: a rank died or stopped answering; two restarts in a row",
        r"2 restarts in \d+ s", starts=3)


def growing_pauses(setup):
    Run(setup, "pauses", "exit 1", "--pause", "0.03").expect(1, r"restart 1 in 0.03 s", r"restart 2 in 0.06 s", starts=3)


EVENTS = r"""
n=$(wc -l < $DIR/starts); s=$(cat $DIR/save 2>/dev/null || echo 0)
say() { echo "sluice-event $1" >&2; }
say "{\"event\":\"start\",\"step\":$s}"
say "{\"event\":\"step\",\"step\":$((s + 15)),\"seconds\":0.001}"
if [ $n -le 9 ]; then
  say "{\"event\":\"save\",\"step\":$((s + 10))}"; echo $((s + 10)) > $DIR/save; exit 1
fi
say "{\"event\":\"end\",\"step\":$((s + 20)),\"seconds\":0.002}"
echo done
"""


def progress(setup):
    """Each start adds a save: no number of restarts is too many. Five steps are lost each time."""
    output = Run(setup, "progress", EVENTS).expect(
        0, "(?m)^done$", r"restart 9 in 0 s, from step 90", r"9 restarts in \d+ s; [\d.]+ % of the time in steps that count, "
        "45 steps lost", starts=10)
    require("sluice-event" not in output, output)


def progress_ends(setup):
    """Saves at first, then none: two more restarts."""
    script = EVENTS.replace("-le 9", "-le 3") .replace("echo done", "exit 1").replace('say "{\\"event\\":\\"end\\"', ': "')
    Run(setup, "ends", script).expect(1, "giving up: .*two restarts in a row added no save; does the job save", starts=5)


def stops(setup, number):
    """Asked, the job gets SIGUSR1, saves and ends with 12. Others than the launcher do not get it."""
    script = "trap 'echo saved; exit 12' USR1; touch $DIR/up; while :; do sleep 0.01; done"
    run = Run(setup, f"stop-{number}", script)
    run.wait_for_file("up")
    run.signal(number)
    run.expect(STOPPED, "(?m)^saved$", "stopping after this step", starts=1)


def stops_a_deaf_job(setup):
    """It ignores SIGUSR1 and SIGTERM, and so do its children."""
    script = IGNORES + "sleep 1000 & (setsid sh -c 'sleep 1000' &) ; touch $DIR/up; while :; do sleep 1; done"
    run = Run(setup, "deaf", script, "--grace", "0.1")
    run.wait_for_file("up")
    run.signal(signal.SIGTERM)
    run.expect(137, starts=1)


def second_signal(setup):
    run = Run(setup, "second", "trap '' USR1; touch $DIR/up; while :; do sleep 0.01; done", "--grace", "1000")
    run.wait_for_file("up")
    deadline = time.monotonic() + PATIENCE
    while run.job.running():  # requests within 0.2 s are one
        require(time.monotonic() < deadline, f"still there\n{run.job.tail()}")
        if "ending the job" not in run.job.output:  # one more would end it by SIGKILL
            run.signal(signal.SIGINT)
        time.sleep(POLL)
    run.expect(143, "stopping after this step", "ending the job", starts=1)


def hangup(setup):
    """Ignored from the start, as under nohup, it stays so."""
    script = "trap 'exit 12' USR1; touch $DIR/up; while :; do sleep 0.01; done"
    run = Run(setup, "hangup", script, wrap=("nohup",))
    run.wait_for_file("up")
    run.signal(signal.SIGHUP)
    require(run.job.handled(run.job.process.pid, signal.SIGHUP), "SIGHUP waits")
    require("stopping" not in run.job.output, run.job.output)
    run.signal(signal.SIGTERM)
    output = run.expect(STOPPED)
    require(output.count("stopping after") == 1, output)


def stop_in_a_pause(setup):
    run = Run(setup, "pause", "exit 1", "--pause", "1000")
    run.job.wait_for(lambda: "restart 1 in 1000 s" in run.job.output, "no pause")
    run.signal(signal.SIGTERM)
    run.expect(STOPPED, starts=1)


def leftovers(setup):
    """A daemon of the job does not outlive it."""
    run = Run(setup, "daemon", "(setsid sh -c 'touch $DIR/up; exec sleep 1000' &); "
                               "while ! [ -e $DIR/up ]; do sleep 0.01; done; exit 0")
    run.expect(0, starts=1)


def killed_supervisor(setup):
    """The kernel tells the launcher, which ends the job."""
    script = ("sleep 1000 & sleeper=$!; trap 'kill $sleeper; touch $DIR/asked; exit 143' TERM; touch $DIR/up; "
              "while :; do sleep 0.01; done")
    run = Run(setup, "orphan", script)
    run.wait_for_file("up")
    run.signal(signal.SIGKILL)
    run.expect(-signal.SIGKILL, starts=1)
    require((run.folder / "asked").exists(), "the launcher was not asked to end")


def killed_launcher_with_a_deaf_rest(setup):
    """What outlives a launcher that is killed is ended, and the job starts again."""
    script = IGNORES + ("(setsid sh -c 'echo $$ > $DIR/pid; while :; do sleep 1; done' &); "
                        "while ! [ -s $DIR/pid ]; do sleep 0.01; done; mv $DIR/pid $DIR/pid-$(wc -l < $DIR/starts); kill -9 $$")
    run = Run(setup, "deaf-rest", script, "--restarts", "1")
    run.expect(137, "the launcher killed by SIGKILL; restart 1", starts=2)


def stopped_supervisor(setup):
    """SIGSTOP: the job goes on and ends; after SIGCONT its end is taken as it was."""
    run = Run(setup, "stopped", "touch $DIR/up; while ! [ -e $DIR/go ]; do sleep 0.01; done; touch $DIR/gone; exit 5")
    run.wait_for_file("up")
    run.signal(signal.SIGSTOP)
    (run.folder / "go").touch()
    run.wait_for_file("gone")
    run.job.wait_for(lambda: set(run.job.processes()) == {run.job.process.pid}, "the job stays")
    run.signal(signal.SIGCONT)
    run.expect(5, starts=1)


def stopped_launcher(setup):
    """SIGSTOP of the launcher: SIGKILL needs no SIGCONT."""
    run = Run(setup, "frozen", "kill -STOP $$", "--grace", "0.1")

    def state(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return ""
    run.job.wait_for(lambda: any(state(pid) == "T" for pid in run.job.processes()), "it does not stop")
    run.signal(signal.SIGTERM)
    run.expect(137, starts=1)


def much_text(setup):
    """100 MB of lines, then 50 MB without an end of line: all of it is there, and memory stays small."""
    script = ("head -c 100000000 /dev/zero | tr '\\0' 'X' | fold -w 99 >&2; echo >&2; "
              "head -c 50000000 /dev/zero | tr '\\0' 'Y' >&2; touch $DIR/up; "
              "while ! [ -e $DIR/go ]; do sleep 0.01; done; exit 3")
    run = Run(setup, "much", script)
    run.wait_for_file("up")
    status = pathlib.Path(f"/proc/{run.job.process.pid}/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
    require(peak < 60000, f"{peak} kB")
    (run.folder / "go").touch()
    require(run.job.finish() == 3, "another code")
    text = run.job.path.read_bytes()
    require(text.count(b"X") == 100000000 and text.count(b"Y") == 50000000, f"{len(text)} bytes")
    run.job.path.unlink()


def reader_that_stopped(setup):
    """Nobody reads what the supervisor passes on: signals still work."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="reader-", dir=setup.folder))
    script = "trap '' USR1; touch $DIR/up; yes >&2"
    process = subprocess.Popen([setup.sluice, "run", "--grace", "0.1", "--", "sh", "-c", script],
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "DIR": str(folder)})
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        require(time.monotonic() < deadline, "still there")
        if (folder / "up").exists():
            process.send_signal(signal.SIGTERM)
        time.sleep(POLL)
    process.stderr.close()
    require(process.returncode == 143, f"exit {process.returncode}")


def closed_outputs(setup):
    """Without standard output and error the job's code is the same."""
    for closed in ("1>&-", "2>&-", "1>&- 2>&-"):
        run = Run(setup, "closed", "exit 1", wrap=("sh", "-c", f'exec "$0" "$@" {closed}'))
        run.expect(1, starts=3)


def not_started(setup):
    for words, why in ((["/no/such/program"], "cannot start '/no/such/program': No such file"),
                       (["no-such-program-of-sluice"], "cannot start 'no-such-program-of-sluice': No such file"),
                       ([str(setup.folder)], "Permission denied")):
        Run(setup, "not-started", "", words=words).expect(USAGE, "sluice: error: .*" + why)


def refused(setup):
    hosts = setup.folder / "refused-hosts"
    hosts.write_text("node1 slots=2\nnode2\n")
    ranks, file = ["sh", "-c", "{ranks}"], ["sh", "-c", "{hostfile}"]
    for code, options, words, why in (
            (USAGE, [], ["{ranks}"], "needs --layouts"),
            (USAGE, [], ["{hostfile}"], "needs --hosts"),
            (USAGE, [], ["x", "{rank}"], "unknown placeholder '{rank}'; did you mean 'ranks'\\?"),
            (USAGE, [], [""], "the command is missing"),
            (USAGE, ["--layouts", "2x2"], ["true"], "--layouts has no effect"),
            (USAGE, ["--layouts", "2y2"], ranks, "'2y2' is no layout"),
            (USAGE, ["--layouts", "2x4,2x3"], ["train", "{replicas}", "--virtual-replicas", "8"],
             "'2x3' has 3 replicas, .*; legal numbers of replicas: 1, 2, 4, 8"),
            (USAGE, ["--layouts", "2x1x4,2x1x3"], ["train", "{tensor}", "--tensor-shards", "8"],
             "'2x1x3' has 3 tensor ranks, .*; legal numbers of tensor ranks: 1, 2, 4, 8"),
            (USAGE, ["--hosts", hosts], ["true"], "--hosts has no effect"),
            (DATA, ["--hosts", setup.folder / "none"], file, "'.*/none': No such file"),
            (DATA, ["--hosts", setup.folder], file, "Is a directory"),
            (DATA, ["--hosts", hosts, "--layouts", "2x2"], file + ["{ranks}"],
             "host 'node2' of '.*' has no number of slots"),
            (USAGE, ["--restarts", "-1"], ["true"], "--restarts: '-1' is not an integer from 0"),
            (USAGE, ["--grace", "nan"], ["true"], "--grace: 'nan' is not a number"),
            (USAGE, ["--restart", "1"], ["true"], "did you mean '--restarts'"),
            (USAGE, ["mpirun"], ["true"], "unexpected argument 'mpirun'")):
        output = Run(setup, "refused", "", *map(str, options), words=words).expect(code, "(?m)^sluice: error: .*" + why)
        require(output.count("\n") == 1, output)
    hosts.write_text("node1 slots=2\nnode2 slots=1\n")
    Run(setup, "refused", "", "--hosts", str(hosts), "--layouts", "4x1,2x2", words=file + ["{ranks}"]).expect(
        USAGE, "none of '4x1,2x2' fits the 3 slots of")
    Run(setup, "refused", "", words=["true"], environment={"OMPI_COMM_WORLD_SIZE": "4"}).expect(
        USAGE, "is a rank of an MPI job; start it alone")


def no_command(setup):
    code, output = setup.run("run")
    require(code == USAGE and "the command is missing; usage: sluice run [options] -- mpirun" in output, output)
    code, output = setup.run("run", "--help")
    require(code == 0 and "--layouts LIST" in output, output)


def environment(setup):
    output = Run(setup, "environment", "env", environment={
        "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "OMPI_MCA_coll": "basic"}).expect(0, starts=1)
    names = set(re.findall(r"^(\w+)=", output, re.MULTILINE))
    require({"OMPI_MCA_coll", "SLUICE_SUPERVISED", "OMPI_ALLOW_RUN_AS_ROOT"} <= names and
            not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & names, output)


def hosts_and_layouts(setup):
    """A host that is lost twice is left out, or whose loss keeps the next start from its steps; the next layout that
    fits is taken."""
    hosts = setup.folder / "three-hosts"
    hosts.write_text("node1 slots=2 # first\nnode2 slots=2\n\nnode3 slots=2\n")
    script = ("echo layout $1 $2 $3 of $(cut -d' ' -f1 $4 | tr '\\n' ' '); echo $4 >> $DIR/files; n=$(wc -l < $DIR/starts); "
              f"if [ $n -le 2 ]; then {REPORT % 'node2'} exit 11; fi; "
              f"if [ $n -eq 3 ]; then {REPORT % 'node3'} exit 11; fi; if [ $n -eq 4 ]; then exit 255; fi")
    run = Run(setup, "hosts", script, "--hosts", str(hosts), "--layouts", "3x2,2x2,2x1",
              words=["sh", "-c", "echo start >> $DIR/starts; " + script, "job", "{ranks}", "{pipeline}", "{replicas}",
                     "{hostfile}"])
    output = run.expect(0, "leaving out node2 from now on", "layout 2x2 instead of 3x2: the same bits",
                        "leaving out node3 from now on", "layout 2x1 instead of 2x2: other replicas", "4 restarts",
                        starts=5)
    layouts = re.findall(r"^layout (.*?) *$", output, re.MULTILINE)
    require(layouts == 2 * ["6 3 2 of node1 node2 node3"] + 2 * ["4 2 2 of node1 node3"] + ["2 2 1 of node1"], output)
    require("sluice-event" not in output, output)
    left = [path for path in (run.folder / "files").read_text().split() if os.path.exists(path)]
    require(not left, f"{left} are left")


def no_layout_fits(setup):
    hosts = setup.folder / "two-hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    run = Run(setup, "no-fit", "", "--hosts", str(hosts), "--layouts", "4x1,3x1", words=[
        "sh", "-c", f"echo start >> $DIR/starts; {REPORT % 'node2'} exit 11", "job", "{ranks}", "{hostfile}"])
    run.expect(11, "giving up: a rank on node2 stopped answering .*; no layout of --layouts fits the 2 slots that are left",
               starts=2)


def full_disk(setup):
    """Where nothing can be written the job starts all the same, and its code is the same."""
    disk, hosts = setup.folder / "full", setup.folder / "hosts"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", disk], stderr=subprocess.DEVNULL, check=False)
    if mount.returncode:
        return "not run: no right to mount"
    try:
        (disk / "output").write_bytes(b"x" * 4096)
        hosts.write_text("node1\n")
        Run(setup, "full", "", "--hosts", str(hosts), environment={"TMPDIR": str(disk)}, words=[
            "sh", "-c", "echo start >> $DIR/starts; grep -q node1 $1 && exit 9", "job", "{hostfile}"],
            wrap=("sh", "-c", f'exec "$0" "$@" >> {disk}/output 2>&1')).expect(9, starts=3)
    finally:
        subprocess.run(["umount", disk], check=False)
    return ""


def launcher_text(setup):
    """It is shown as it is."""
    wall = "-" * 74 + "\\nThere are not enough slots\\n" + "-" * 74 + "\\n"
    output = Run(setup, "text", f"printf %b '{wall}' >&2; exit 2").expect(2, starts=1)
    require(output.startswith(wall.replace("\\n", "\n")), output)


CASES = {
    "exit codes": exit_codes,
    "a launcher that is killed": killed_launcher,
    "--restarts 0": no_restarts,
    "a job that always fails": always_fails,
    "pauses": growing_pauses,
    "progress": progress,
    "progress that ends": progress_ends,
    **{f"{number.name} stops": functools.partial(stops, number=number)
       for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)},
    "a deaf job": stops_a_deaf_job,
    "a second signal": second_signal,
    "SIGHUP under nohup": hangup,
    "a stop in a pause": stop_in_a_pause,
    "a daemon": leftovers,
    "kill -9 of the supervisor": killed_supervisor,
    "kill -9 of the launcher": killed_launcher_with_a_deaf_rest,
    "SIGSTOP of the supervisor": stopped_supervisor,
    "SIGSTOP of the launcher": stopped_launcher,
    "much text": much_text,
    "a reader that stopped": reader_that_stopped,
    "closed outputs": closed_outputs,
    "no such program": not_started,
    "what is refused": refused,
    "no command": no_command,
    "environment": environment,
    "hosts and layouts": hosts_and_layouts,
    "no layout that fits": no_layout_fits,
    "a full disk": full_disk,
    "the launcher's text": launcher_text,
}


def campaign():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    setup = Setup(options)

    def checked(case):
        try:
            return case(setup)
        except OSError as error:
            raise Violation(str(error)) from error
    return run_cases(setup, "supervised jobs", [(name, functools.partial(checked, case)) for name, case in CASES.items()
                                                if options.case in (None, name)])


if __name__ == "__main__":
    main(campaign)
