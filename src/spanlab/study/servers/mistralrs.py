"""mistral.rs for CPUs: the version of the preset `mistralrs_0_9`, behind a server of this package."""

from __future__ import annotations

from pathlib import Path

from spanlab.settings.study import Study
from spanlab.study.servers.base import LOOPBACK, SERVERS, EmbeddedServer, Launch, served_folder

_SERVER = Path(__file__).with_name("mistralrs_server.py")


@SERVERS.register("mistralrs")
class MistralRs(EmbeddedServer):
    """mistral.rs 0.9.5 for CPUs: prefix caching of whole sequences, of which it evicts none."""

    environment = "mistralrs"
    version = "0.9.5"
    policy = "sequences"
    overrides = (
        *("arms=presets", "only=[mistralrs_0_9]", "baseline=mistralrs_0_9"),
        "arms.mistralrs_0_9.options.prefix_cache_n=null",
    )
    knows_salts = False

    def check(self, study: Study) -> None:
        """Raise ValueError for an arm of another cache, or with an eviction that a CPU does not have."""
        super().check(study)
        (arm,) = study.chosen()
        limit = study.arms[arm].options.get("prefix_cache_n", 16)
        if limit is not None:
            raise ValueError(
                f"arms.{arm}.options.prefix_cache_n={limit} with server.engine=mistralrs: "
                "expected null, for on a CPU mistral.rs evicts no sequence"
            )

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server."""
        study = launch.study
        options = {
            "name": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "max-seqs": study.batch.max_num_seqs,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["python", "-I", str(_SERVER), str(served_folder(study)), *given, *study.server.arguments]

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return what keeps the server offline."""
        return {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
