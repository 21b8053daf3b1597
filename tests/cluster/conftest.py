"""One cluster of Ray for all tests: two nodes, which are processes of this machine."""

import warnings

import pytest


@pytest.fixture(scope="session")
def nodes():
    import ray
    from ray.cluster_utils import Cluster

    from engram.remote.fleet import members
    from engram.serving import on_ray

    on_ray._PATIENCE_S = members.SKIP_S = 240.0  # machines that run tests are busy
    each = {"num_cpus": 4, "object_store_memory": 80_000_000}
    ray.shutdown()  # examples of a page may have begun one in this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own start
        cluster = Cluster(
            initialize_head=True, head_node_args={**each, "include_dashboard": False, "resources": {"here": 1}}
        )
        cluster.add_node(**each, resources={"away": 1})
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
