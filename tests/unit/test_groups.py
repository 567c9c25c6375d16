from megatron.oases.runtime.groups import members


def test_sub_groups_are_runs_of_ranks_and_peers_are_apart():
    assert members(1, 2, 4) == [[0, 1], [2, 3]]
    assert members(2, 4, 4) == [[0, 2], [1, 3]]
    assert members(1, 1, 4) == [[0], [1], [2], [3]]


def test_what_moves_between_degrees_stays_within_the_run_that_shares_samples():
    assert members(1, 2, 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(2, 4, 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(2, 6, 12) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
