import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world2():
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world4():
    world = World(4)
    yield world
    world.close()
