"""A SLURM of one's own: a controller and two nodes on this machine (Debian's slurm-wlm and munge; root)."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from launched import HANG_SECONDS

# A requeued job waits for as long as credentials live, two minutes by default, and for the scheduler.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=17100
SlurmdPort=17101
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17201 CPUs=4 Gres=gpu:1
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17202 CPUs=4 Gres=gpu:1
PartitionName=main Nodes=n1,n2 Default=YES State=UP
"""


class Cluster:
    """Daemons in a folder, and the commands that talk to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started_munge = False

    def start(self) -> None:
        """Start munge, where it does not run, the controller and the nodes; back when the nodes are idle."""
        (self.folder / "state").mkdir()
        for node in ("n1", "n2"):
            (self.folder / f"spool-{node}").mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder))
        # A GPU that is none, so that the batch files can ask for one.
        (self.folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null\n")
        if subprocess.run(["munge", "-n"], capture_output=True).returncode:
            for place in ("/run/munge", "/var/log/munge", "/var/lib/munge", "/etc/munge"):
                os.makedirs(place, exist_ok=True)
                shutil.chown(place, "munge", "munge")
            subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)
            self._started_munge = True
        configuration = str(self.folder / "slurm.conf")
        subprocess.run(["slurmctld", "-f", configuration], check=True)
        for node in ("n1", "n2"):
            subprocess.run(["slurmd", "-f", configuration, "-N", node], check=True)
        self.until(lambda: self.run("sinfo", "-h", "-o", "%T") == "idle")

    def stop(self) -> None:
        """Cancel what runs and end what `start` started."""
        self.run("scancel", "--signal=KILL", "--full", "--user=root")
        pid_files = [self.folder / f"{name}.pid" for name in ("slurmd-n1", "slurmd-n2", "slurmctld")]
        if self._started_munge:
            pid_files.append(Path("/run/munge/munged.pid"))
        for file in pid_files:
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """What a SLURM command prints."""
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, **environment: str) -> str:
        """The id of a new job."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd, **environment)

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, Reason, ..."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+)=(\S+)", shown))

    def until(self, condition: Callable[[], bool]) -> None:
        """Ask every half second; SLURM has nobody to wait on."""
        end = time.monotonic() + HANG_SECONDS
        while not condition():
            assert time.monotonic() < end, f"{condition} did not come true in {HANG_SECONDS} s"
            time.sleep(0.5)

    def finished(self, job: str) -> dict[str, str]:
        """Wait for the end of a job; what SLURM then says of it."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.job(job)["JobState"] in ends)
        return self.job(job)
