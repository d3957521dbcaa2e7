/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the command line of kvmd.
 *
 * Everything is checked before anything is opened; the rest is kvd_init(), kvd_run(),
 * kvd_fini().
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/harden.h"
#include "kvmd/mover/wire.h"

#define EXIT_USAGE 2

static const char usage_text[] =
	"Usage: kvmd [OPTION]...\n"
	"GPU KV-cache memory daemon: owns every KV page of this host.\n"
	"\n"
	"      --config FILE        tenants, domains, quotas (JSON); without it one tenant\n"
	"                           \"default\" for the caller's uid\n"
	"      --socket PATH        engine socket [" KVMD_SOCKET_DEFAULT "]\n"
	"      --admin-socket PATH  kvmctl's socket [" KVMD_ADMIN_SOCKET_DEFAULT "]\n"
	"      --state-dir DIR      counters that survive a restart [/var/lib/kvmd]\n"
	"      --keeper             state outlives kill -9: in a keeper process [on]\n"
	"      --no-keeper          it does not [with --private]\n"
	"      --user NAME          become this user before anything is opened; root without it\n"
	"                           keeps root, and status says so\n"
	"      --private DIR        all of it in DIR, for the caller's uid only\n"
	"      --backend NAME       auto, host, cuda or cuda-legacy: where page memory comes\n"
	"                           from; auto takes the GPU if there is one and host memory\n"
	"                           is not asked for by --host-bytes, and at a restart the\n"
	"                           memory that kept pages are in. cuda-legacy: where\n"
	"                           memory cannot be exported as a descriptor; one domain,\n"
	"                           and nothing outlives kvmd [auto]\n"
	"      --host-bytes SIZE    most memory of the host backend, like 4GiB\n"
	"      --gpu GPU-UUID       the GPU to serve, where there are several\n"
	"      --gpu-bytes SIZE     most memory of the GPU for pages [90 % of it]\n"
	"      --check MODE         batch, off or strict; overrides the file\n"
	"      --spin               spin 20 us after work also with fewer than 4 CPUs\n"
	"      --test-layouts       allow float32 pages (tests)\n"
	"      --test-extents       GPU extents from 2 MiB on (tests)\n"
	"      --no-uring           use epoll although io_uring works\n"
	"      --faults SPEC        arm fault points (tests): point:key=value,...;point...\n"
	"      --ready-fd N         write \"ready\\n\" to N when serving\n"
	"      --die-with-parent    end when the parent process ends\n"
	"      --foreground         stay in the foreground (always so)\n"
	"      --check-policy       start nothing: read options and policy, and say what is wrong\n"
	"                           with them (exit 1; 2 the options)\n"
	"  -v, --verbose            debug lines as well\n"
	"      --version            print the version\n"
	"  -h, --help               print this\n";

enum opt_id {
	OPT_CONFIG = 256,
	OPT_SOCKET,
	OPT_ADMIN,
	OPT_STATE,
	OPT_PRIVATE,
	OPT_BACKEND,
	OPT_HOST_BYTES,
	OPT_GPU,
	OPT_GPU_BYTES,
	OPT_CHECK,
	OPT_SPIN,
	OPT_TEST_LAYOUTS,
	OPT_TEST_EXTENTS,
	OPT_NO_URING,
	OPT_FAULTS,
	OPT_READY_FD,
	OPT_DIE,
	OPT_FOREGROUND,
	OPT_KEEPER,
	OPT_NO_KEEPER,
	OPT_USER,
	OPT_CHECK_POLICY,
	OPT_VERSION,
};

static const struct option long_options[] = {
	{"config", required_argument, NULL, OPT_CONFIG},
	{"socket", required_argument, NULL, OPT_SOCKET},
	{"admin-socket", required_argument, NULL, OPT_ADMIN},
	{"state-dir", required_argument, NULL, OPT_STATE},
	{"private", required_argument, NULL, OPT_PRIVATE},
	{"backend", required_argument, NULL, OPT_BACKEND},
	{"host-bytes", required_argument, NULL, OPT_HOST_BYTES},
	{"gpu", required_argument, NULL, OPT_GPU},
	{"gpu-bytes", required_argument, NULL, OPT_GPU_BYTES},
	{"check", required_argument, NULL, OPT_CHECK},
	{"spin", no_argument, NULL, OPT_SPIN},
	{"test-layouts", no_argument, NULL, OPT_TEST_LAYOUTS},
	{"test-extents", no_argument, NULL, OPT_TEST_EXTENTS},
	{"no-uring", no_argument, NULL, OPT_NO_URING},
	{"faults", required_argument, NULL, OPT_FAULTS},
	{"ready-fd", required_argument, NULL, OPT_READY_FD},
	{"die-with-parent", no_argument, NULL, OPT_DIE},
	{"foreground", no_argument, NULL, OPT_FOREGROUND},
	{"keeper", no_argument, NULL, OPT_KEEPER},
	{"no-keeper", no_argument, NULL, OPT_NO_KEEPER},
	{"user", required_argument, NULL, OPT_USER},
	{"check-policy", no_argument, NULL, OPT_CHECK_POLICY},
	{"verbose", no_argument, NULL, 'v'},
	{"version", no_argument, NULL, OPT_VERSION},
	{"help", no_argument, NULL, 'h'},
	{NULL, 0, NULL, 0},
};

static char upgrade_path[1024]; /* where we were started from */

struct cmdline {
	struct kvd_options opt;
	const char *private_dir;
	const char *explicit_path; /* an option that --private excludes */
	const char *user;
	bool die_with_parent;
	bool verbose;
	bool check_policy;
	int keeper; /* -1: as --private says */
};

static int bad(const char *option, const char *value, const char *why)
{
	fprintf(stderr, "kvmd: %s %s: %s\n", option, value, why);
	return -EINVAL;
}

static int set_path(char *dst, size_t room, const char *option, const char *value)
{
	if (!*value)
		return bad(option, "\"\"", "must not be empty");
	if (strlen(value) >= room)
		return bad(option, value, "too long");
	strcpy(dst, value);
	return 0;
}

static int set_check(struct kvd_options *opt, const char *value)
{
	static const char *const names[] = {"batch", "off", "strict"};
	int i;

	for (i = 0; i < 3; i++) {
		if (!strcmp(value, names[i])) {
			opt->check = i;
			return 0;
		}
	}
	return bad("--check", value, "must be batch, off or strict");
}

static int set_backend(struct kvd_options *opt, const char *value)
{
	static const char *const names[] = {
		[KVD_BACKEND_AUTO] = "auto",
		[KVD_BACKEND_HOST] = "host",
		[KVD_BACKEND_CUDA] = "cuda",
		[KVD_BACKEND_CUDA_LEGACY] = "cuda-legacy",
	};

	for (int i = 0; i < (int)KV_ARRAY_SIZE(names); i++) {
		if (!strcmp(value, names[i])) {
			opt->backend = (enum kvd_backend_choice)i;
			return 0;
		}
	}
	return bad("--backend", value, "must be auto, host, cuda or cuda-legacy");
}

/* An option of a memory that was excluded would be ignored without a word. */
static int check_backend(const struct kvd_options *opt)
{
	bool gpu = opt->gpu_named || opt->gpu_bytes;

	if ((opt->backend == KVD_BACKEND_CUDA ||
	     opt->backend == KVD_BACKEND_CUDA_LEGACY) &&
	    opt->host_bytes)
		return bad("--host-bytes", "SIZE", "does not go with --backend cuda");
	if (gpu && (opt->backend == KVD_BACKEND_HOST || opt->host_bytes))
		return bad(opt->gpu_named ? "--gpu" : "--gpu-bytes", "",
			   "does not go with host memory");
	return 0;
}

static int set_fd(struct kvd_options *opt, const char *value)
{
	char *end;
	long v = strtol(value, &end, 10);

	if (end == value || *end || v < 0 || v > 1 << 20)
		return bad("--ready-fd", value, "not a file descriptor");
	opt->ready_fd = (int)v;
	return 0;
}

static int set_value(struct cmdline *cmd, int id, const char *value)
{
	struct kvd_options *opt = &cmd->opt;

	switch (id) {
	case OPT_CONFIG:
		opt->config_path = value;
		return 0;
	case OPT_SOCKET:
		cmd->explicit_path = "--socket";
		return set_path(opt->socket_path, sizeof(opt->socket_path), "--socket",
				value);
	case OPT_ADMIN:
		cmd->explicit_path = "--admin-socket";
		return set_path(opt->admin_path, sizeof(opt->admin_path),
				"--admin-socket", value);
	case OPT_STATE:
		cmd->explicit_path = "--state-dir";
		return set_path(opt->state_dir, sizeof(opt->state_dir), "--state-dir",
				value);
	case OPT_USER:
		if (!*value)
			return bad("--user", "\"\"", "must not be empty");
		cmd->user = value;
		return 0;
	case OPT_PRIVATE:
		cmd->private_dir = value;
		return 0;
	case OPT_BACKEND:
		return set_backend(opt, value);
	case OPT_HOST_BYTES:
		if (kvd_size_parse(value, &opt->host_bytes) || opt->host_bytes < 2u << 20)
			return bad("--host-bytes", value,
				   "not a size like 4GiB, of 2MiB at least");
		return 0;
	case OPT_GPU:
		if (kvd_uuid_parse(value, opt->gpu_uuid))
			return bad("--gpu", value, "not GPU- and a UUID");
		opt->gpu_named = true;
		return 0;
	case OPT_GPU_BYTES:
		if (kvd_size_parse(value, &opt->gpu_bytes) || opt->gpu_bytes < 2u << 20)
			return bad("--gpu-bytes", value,
				   "not a size from 2MiB, like 40GiB");
		return 0;
	case OPT_CHECK:
		return set_check(opt, value);
	case OPT_FAULTS:
		opt->faults = value;
		return 0;
	case OPT_READY_FD:
		return set_fd(opt, value);
	}
	return -EINVAL;
}

/* Return: 0 go on; 1 done (help, version); -EINVAL */
static int parse_args(struct cmdline *cmd, int argc, char **argv)
{
	int id, r = 0;

	while (!r && (id = getopt_long(argc, argv, "vh", long_options, NULL)) != -1) {
		switch (id) {
		case OPT_SPIN:
			cmd->opt.spin = true;
			break;
		case OPT_TEST_LAYOUTS:
			cmd->opt.test_layouts = true;
			break;
		case OPT_TEST_EXTENTS:
			cmd->opt.test_extents = true;
			break;
		case OPT_NO_URING:
			cmd->opt.force_epoll = true;
			break;
		case OPT_DIE:
			cmd->die_with_parent = true;
			break;
		case OPT_KEEPER:
			cmd->keeper = 1;
			break;
		case OPT_NO_KEEPER:
			cmd->keeper = 0;
			break;
		case OPT_FOREGROUND:
			break;
		case OPT_CHECK_POLICY:
			cmd->check_policy = true;
			break;
		case 'v':
			cmd->verbose = true;
			break;
		case OPT_VERSION:
			printf("kvmd %s (ABI %u)\n", KVD_VERSION, KV_ABI_VERSION);
			return 1;
		case 'h':
			fputs(usage_text, stdout);
			return 1;
		case '?':
			return -EINVAL;
		default:
			r = set_value(cmd, id, optarg);
		}
	}
	if (!r && optind < argc)
		return bad("argument", argv[optind], "kvmd takes none");
	return r ? r : check_backend(&cmd->opt);
}

static int private_paths(struct cmdline *cmd)
{
	struct kvd_options *opt = &cmd->opt;
	const char *dir = cmd->private_dir;

	if (cmd->explicit_path)
		return bad("--private", dir,
			   "sets sockets and state itself: drop the other "
			   "option");
	/* The longest of the three; the keeper's is made of the state directory. */
	if (strlen(dir) + sizeof("/keeper.sock") > sizeof(opt->socket_path))
		return bad("--private", dir, "too long for a socket path");
	if (!cmd->check_policy && mkdir(dir, 0700) && errno != EEXIST)
		return bad("--private", dir, strerror(errno));
	snprintf(opt->socket_path, sizeof(opt->socket_path), "%.95s/kvmd.sock", dir);
	snprintf(opt->admin_path, sizeof(opt->admin_path), "%.95s/admin.sock", dir);
	snprintf(opt->state_dir, sizeof(opt->state_dir), "%s", dir);
	opt->socket_mode = 0600;
	return 0;
}

/* Behind harden(): the kernel forgets it when a process becomes another user. The parent may have
 * died before prctl(): then nobody would send the signal. */
static int die_with_parent(pid_t parent)
{
	if (prctl(PR_SET_PDEATHSIG, SIGTERM))
		return -errno;
	return getppid() == parent ? 0 : -ECHILD;
}

/* The program that is at the path now takes over what the keeper holds. --ready-fd was for
 * the first start. */
static int exec_again(char **argv)
{
	char **out = argv;

	for (char **in = argv; *in; in++) {
		if (!strcmp(*in, "--ready-fd") && in[1])
			in++;
		else if (strncmp(*in, "--ready-fd=", 11))
			*out++ = *in;
	}
	*out = NULL;
	execv(upgrade_path, argv);
	return -errno;
}

/* A number below 3 that is free would be the next socket's: lines for stderr would go there, and a
 * child that is given one as its 3 would find it closed. */
static void std_fds_open(void)
{
	int fd;

	do {
		fd = open("/dev/null", O_RDWR);
	} while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}

/* An extent is a descriptor, and so is much of a session. */
static void raise_nofile(void)
{
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim) || lim.rlim_cur == lim.rlim_max)
		return;
	lim.rlim_cur = lim.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &lim))
		kvd_warn("main", "nofile: %s", strerror(errno));
}

/* @paths: NULL: no directory is made or given away. Return: 0; -EINVAL, said on stderr */
static int user_become(const struct cmdline *cmd, const struct kvd_harden_paths *paths)
{
	char error[KVD_CONFIG_ERROR_BYTES];

	if (!cmd->user)
		return 0;
	if (cmd->private_dir)
		return bad("--user", cmd->user, "--private is for the caller's uid");
	if (!kvd_harden_user(cmd->user, paths, error, sizeof(error)))
		return 0;
	fprintf(stderr, "kvmd: %s\n", error);
	return -EINVAL;
}

/* What is given up for good. Return: 0; -EINVAL, said on stderr */
static int harden(struct cmdline *cmd)
{
	const struct kvd_harden_paths paths = {
		.state_dir = cmd->opt.state_dir,
		.socket_path = cmd->opt.socket_path,
		.admin_path = cmd->opt.admin_path,
	};

	if (!cmd->private_dir)
		kvd_harden_environment();
	raise_nofile();
	if (user_become(cmd, &paths))
		return -EINVAL;
	cmd->opt.as_root = !cmd->private_dir && !geteuid() &&
			   !strncmp(cmd->opt.socket_path, "/run/", 5);
	cmd->opt.seccomp_error = kvd_harden_seccomp();
	return 0;
}

/* As the user that would read the policy. Return: exit status */
static int check_policy(struct kvd *kvd, const struct cmdline *cmd)
{
	char error[KVD_CONFIG_ERROR_BYTES];

	if (user_become(cmd, NULL))
		return 1;
	if (!kvd_try(kvd, &cmd->opt, error))
		return 0;
	fprintf(stderr, "kvmd: %s\n", error);
	return 1;
}

/*
 * A start that is refused is refused again: where systemd starts the next one at once
 * (tools/systemd/kvmd.service), once a second is often enough. It says whom it started; what runs
 * in a shell that it started has the variable as well, with another pid.
 */
static void refused_pause(void)
{
	const char *pid = getenv("SYSTEMD_EXEC_PID");

	if (pid && atol(pid) == getpid())
		sleep(1);
}

int main(int argc, char **argv)
{
	static struct kvd kvd;
	struct cmdline cmd = {
		.opt = {.check = -1, .ready_fd = -1, .socket_mode = 0666},
		.keeper = -1,
	};
	char error[KVD_CONFIG_ERROR_BYTES];
	pid_t parent = getppid();
	ssize_t n;
	int r;

	std_fds_open();
	if (argc == 4 && !strcmp(argv[1], "--keeper-process"))
		return kvd_keeper_main(atoi(argv[2]), atoi(argv[3]));
	if ((argc == 3 || argc == 4) && !strcmp(argv[1], "--mover-process"))
		return kvd_mover_main(atoi(argv[2]), argv[3]);
	strcpy(cmd.opt.socket_path, KVMD_SOCKET_DEFAULT);
	strcpy(cmd.opt.admin_path, KVMD_ADMIN_SOCKET_DEFAULT);
	strcpy(cmd.opt.state_dir, "/var/lib/kvmd");
	r = parse_args(&cmd, argc, argv);
	if (r > 0)
		return 0;
	if (!r && cmd.private_dir)
		r = private_paths(&cmd);
	if (r)
		return EXIT_USAGE;
	if (cmd.check_policy)
		return check_policy(&kvd, &cmd);
	/* What a service manager would have made. */
	if (!strncmp(cmd.opt.socket_path, "/run/kvmd/", 10) ||
	    !strncmp(cmd.opt.admin_path, "/run/kvmd/", 10))
		mkdir("/run/kvmd", 0755);
	kvd_log_setup(STDERR_FILENO, cmd.verbose ? KVD_LOG_DBG : KVD_LOG_INFO);
	n = readlink("/proc/self/exe", upgrade_path, sizeof(upgrade_path) - 1);
	upgrade_path[n > 0 ? n : 0] = 0;
	cmd.opt.program = upgrade_path;
	cmd.opt.argv = argv;
	cmd.opt.keeper = cmd.keeper < 0 ? !cmd.private_dir : cmd.keeper;
	cmd.opt.keeper_die_with = cmd.die_with_parent ? parent : 0;
	if (harden(&cmd))
		return 1;
	if (cmd.die_with_parent && die_with_parent(parent)) {
		fprintf(stderr, "kvmd: the parent is gone\n");
		return 1;
	}
	r = kvd_init(&kvd, &cmd.opt, error);
	if (r) {
		fprintf(stderr, "kvmd: %s\n", error);
		refused_pause();
		return 1;
	}
	r = kvd_run(&kvd);
	kvd_fini(&kvd);
	if (!r && (kvd.upgrade || kvd.again))
		r = exec_again(argv);
	if (r)
		fprintf(stderr, "kvmd: event loop: %s\n", strerror(-r));
	return r ? 1 : 0;
}
