"""Small settings for each recipe: TorchRL's wheel has the programs without their settings, so these are written for engram.

``settings`` maps the names of files to what they hold. ``data`` names the environment whose rows stand in for a data set.
Draws by priorities are left out: those branches of the recipes call ``update_priority`` with a batch alone, which TorchRL's
buffers take no more than engram's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    script: str
    settings: dict[str, dict]
    needs: tuple[str, ...] = ("hydra", "tqdm", "gymnasium")
    arguments: tuple[str, ...] = ()
    data: str = ""
    cuda: bool = False


NO_LOG = {"backend": "", "exp_name": "x", "mode": "offline", "project_name": "x", "group_name": None, "video": False}
NO_COMPILE = {"compile": False, "compile_mode": None, "cudagraphs": False}
PENDULUM = {"name": "Pendulum-v1", "task": "", "library": "gymnasium", "backend": "gymnasium", "seed": 1}
FRAMES = {
    "total_frames": 120,
    "frames_per_batch": 40,
    "init_random_frames": 40,
    "env_per_collector": 1,
    "device": "cpu",
    "reset_at_each_iter": False,
    "max_frames_per_traj": 40,
}


def off_policy(**optim):
    """Settings of the recipes that write transitions and draw batches of them."""
    return {
        "env": {**PENDULUM, "max_episode_steps": 30, "train_num_envs": 1, "eval_num_envs": 1},
        "collector": dict(FRAMES),
        "replay_buffer": {"prb": False, "size": 100, "scratch_dir": None},
        "optim": {
            "utd_ratio": 0.1,
            "gamma": 0.99,
            "loss_function": "l2",
            "lr": 1e-3,
            "weight_decay": 0.0,
            "adam_eps": 1e-8,
            "batch_size": 16,
            "target_update_polyak": 0.995,
            "device": "cpu",
            **optim,
        },
        "network": {
            "hidden_sizes": [16, 16],
            "activation": "relu",
            "noise_type": "gaussian",
            "device": "cpu",
            "default_policy_scale": 1.0,
            "scale_lb": 0.1,
        },
        "logger": {**NO_LOG, "eval_iter": 1000, "num_eval_envs": 1},
        "compile": NO_COMPILE,
    }


DQN = {
    "device": "cpu",
    "env": {"env_name": "CartPole-v1"},
    "collector": {**FRAMES, "annealing_frames": 100, "eps_start": 1.0, "eps_end": 0.1},
    "buffer": {"buffer_size": 100, "batch_size": 16},
    "logger": {**NO_LOG, "test_interval": 1000, "num_test_episodes": 1},
    "optim": {"lr": 1e-3},
    "loss": {"gamma": 0.99, "hard_update_freq": 5, "num_updates": 4},
    "compile": NO_COMPILE,
    "checkpoint": {
        "path": "saved",
        "interval": 40,
        "resume": False,
        "strict": "error",
        "format": "directory",
        "include_replay_buffer": True,
    },
}
ON_POLICY = {
    "env": {
        "env_name": "Pendulum-v1",
        "backend": "gym",
        "config_overrides": None,
        "num_envs": 1,
        "batch_mode": "parallel",
        "normalize_observation": True,
        "max_episode_steps": 30,
    },
    "collector": {"frames_per_batch": 64, "total_frames": 192},
    "logger": {**NO_LOG, "test_interval": 10_000, "num_test_episodes": 1},
    "optim": {"lr": 3e-4, "anneal_lr": True, "device": "cpu"},
    "loss": {
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "mini_batch_size": 16,
        "ppo_epochs": 2,
        "clip_epsilon": 0.2,
        "anneal_clip_epsilon": True,
        "critic_coeff": 0.25,
        "entropy_coeff": 0.01,
        "loss_critic_type": "l2",
        "device": "cpu",
    },
    "compile": NO_COMPILE,
    "checkpoint": {"path": None, "interval": 0},
}
#: Of an environment that observes float64, as those of MuJoCo do.
DOUBLE = {**ON_POLICY, "env": {**ON_POLICY["env"], "env_name": "Pendulum64-v0"}}
IQL = {
    **off_policy(),
    "model": {"hidden_sizes": [16, 16], "activation": "relu", "default_policy_scale": 1.0, "scale_lb": 0.1},
    "optim": {**off_policy()["optim"], "gradient_steps": 5},
    "loss": {
        "loss_function": "l2",
        "gamma": 0.99,
        "tau": 0.005,
        "hard_update_interval": 10,
        "temperature": 3.0,
        "expectile": 0.7,
    },
}
OFFLINE_IQL = {
    **IQL,
    "replay_buffer": {"dataset": "local", "batch_size": 16},
    "logger": {**NO_LOG, "eval_iter": 1000, "eval_steps": 20, "eval_envs": 1},
}
DECISIONS = {
    "env": {
        **PENDULUM,
        "library": "gym",
        "frame_skip": 1,
        "reward_scaling": 0.001,
        "num_train_envs": 1,
        "num_eval_envs": 1,
        "stacked_frames": 10,
        "inference_context": 5,
        "target_return_mode": "reduce",
        "eval_target_return": 10,
        "collect_target_return": 20,
    },
    "replay_buffer": {
        "dataset": "local",
        "batch_size": 8,
        "stacked_frames": 10,
        "capacity": 100,
        "prefetch": 2,
        "scratch_dir": None,
        "device": "cpu",
    },
    "transformer": {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 1,
        "n_inner": 32,
        "activation": "relu",
        "n_positions": 64,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "optim": {
        "device": "cpu",
        "lr": 1e-4,
        "weight_decay": 5e-4,
        "batch_size": 8,
        "pretrain_gradient_steps": 3,
        "clip_grad": 0.25,
        "warmup_steps": 10,
        "optimizer": "adamw",
    },
    "loss": {"loss_function": "l2"},
    "logger": {**NO_LOG, "eval_steps": 8, "pretrain_log_interval": 2, "model_name": "x", "fintune_log_interval": 1},
    "compile": NO_COMPILE,
}


DREAMER = {
    "env": {
        **PENDULUM,
        "backend": "gym",
        "device": "cpu",
        "frame_skip": 1,
        "from_pixels": False,
        "grayscale": False,
        "image_size": 16,
        "horizon": 30,
        "n_parallel_envs": 1,
    },
    "collector": {
        "num_collectors": 1,
        "frames_per_batch": 30,
        "init_random_frames": 60,
        "compile": {"enabled": False, "backend": "inductor", "mode": "default", "cudagraphs": False},
    },
    "replay_buffer": {"batch_size": 20, "batch_length": 10, "buffer_size": 400, "prefetch": 2, "scratch_dir": None},
    "networks": {
        "activation": "elu",
        "device": "cpu",
        "exploration_noise": 0.3,
        "hidden_dim": 16,
        "rssm_hidden_dim": 16,
        "state_dim": 8,
        "use_scan": False,
        "rssm_rollout": {"compile": False, "compile_backend": "inductor", "compile_mode": "default"},
    },
    "optimization": {
        "total_optim_steps": 3,
        "log_every": 1,
        "grad_clip": 100,
        "world_model_lr": 6e-4,
        "actor_lr": 8e-5,
        "value_lr": 8e-5,
        "imagination_horizon": 4,
        "gamma": 0.99,
        "lmbda": 0.95,
        "autocast": False,
        "compile": {"enabled": False, "backend": "inductor", "cudagraphs": False, "losses": []},
    },
    "logger": {
        **NO_LOG,
        "project": "x",
        "eval_every": 1000,
        "eval_rollout_steps": 10,
        "video_skip": 1,
        "eval_num_envs": 1,
    },
    "profiling": {
        "enabled": False,
        "total_optim_steps": 1,
        "skip_first": 0,
        "warmup_steps": 0,
        "active_steps": 1,
        "trace_file": "x",
        "profile_cuda": False,
        "profile_memory": False,
        "record_shapes": False,
        "with_stack": False,
        "with_flops": False,
        "collector": {"enabled": False},
    },
}


def plain(script, settings, **more):
    return Recipe(script, {"config.yaml": settings}, **more)


RECIPES = {
    "dqn": Recipe("dqn/dqn_cartpole.py", {"config_cartpole.yaml": DQN}),
    "ddpg": plain("ddpg/ddpg.py", off_policy()),
    "td3": plain("td3/td3.py", off_policy(policy_update_delay=2, policy_noise=0.2, noise_clip=0.5)),
    "sac": plain("sac/sac.py", off_policy(alpha_init=1.0)),
    "ppo": Recipe("ppo/ppo_mujoco.py", {"config_mujoco.yaml": ON_POLICY}),
    "a2c": Recipe("a2c/a2c_mujoco.py", {"config_mujoco.yaml": DOUBLE}),
    "iql, online": Recipe("iql/iql_online.py", {"online_config.yaml": IQL}),
    "iql, offline": Recipe("iql/iql_offline.py", {"offline_config.yaml": OFFLINE_IQL}, data="Pendulum-v1"),
    "decision transformer": Recipe(
        "decision_transformer/dt.py",
        {"dt_config.yaml": DECISIONS},
        needs=("hydra", "tqdm", "gymnasium", "transformers"),
        data="Pendulum-v1",
    ),
    "dreamer": plain("dreamer/dreamer.py", DREAMER, cuda=True),
    "ppo of atari": Recipe(
        "ppo/ppo_atari.py", {"config_atari.yaml": ON_POLICY}, needs=("hydra", "tqdm", "gymnasium", "ale_py")
    ),
    "dqn of atari": Recipe(
        "dqn/dqn_atari.py", {"config_atari.yaml": DQN}, needs=("hydra", "tqdm", "gymnasium", "ale_py")
    ),
}
