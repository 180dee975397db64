"""What launchers tell a process that they start."""

import pytest

from runtime.ranks.launch import Launch, first_host


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch(rank=1, size=4, url="env://")),
        (
            {
                **{"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[07-08]"},
                **{"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"},
            },
            Launch(rank=2, size=3, url="tcp://n07:20306"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, None),
    ],
)
def test_what_torchrun_or_srun_says_is_found(environment: dict[str, str], expected: Launch | None) -> None:
    assert Launch.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("gpu[03-07,11],b", "gpu03"), ("n[1,3]x", "n1x"), ("n-1,m", "n-1")]
)
def test_the_first_host_of_a_list_of_slurm_is_known(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(("url", "host"), [("tcp://n07:20306", "n07"), ("file:///tmp/meet", "localhost")])
def test_where_the_first_rank_can_be_reached_is_in_the_url(url: str, host: str) -> None:
    assert Launch(rank=1, size=2, url=url).host == host
