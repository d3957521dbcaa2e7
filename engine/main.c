/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - kv-engine: picks the command. */
#include <errno.h>
#include <string.h>

#include "engine/cli.h"
#include "engine/openmp.h"
#include "kv/abi.h"

/* What was printed has to get there: a full disk or a closed pipe is a failure. */
static int printed(int rc)
{
	if (!fflush(stdout) && !ferror(stdout))
		return rc;
	fprintf(stderr, "kv-engine: output: %s\n", strerror(errno));
	return rc ? rc : ENG_EXIT_FAIL;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(const struct eng_cli *cli);
	} commands[] = {
		{"run", eng_cmd_run},
		{"serve", eng_cmd_serve},
		{"eval", eng_cmd_eval},
		{"bench", eng_cmd_bench},
	};
	struct eng_cli cli;
	int rc;

	eng_openmp_passive(argv);
	if (argc == 2 && (!strcmp(argv[1], "version") || !strcmp(argv[1], "--version"))) {
		printf("kv-engine abi %u\n", KV_ABI_VERSION);
		return printed(ENG_EXIT_OK);
	}
	for (size_t i = 0; argc > 1 && i < KV_ARRAY_SIZE(commands); i++) {
		if (strcmp(argv[1], commands[i].name))
			continue;
		rc = eng_cli_parse(argc, argv, &cli);
		if (rc)
			return rc < 0 ? ENG_EXIT_USAGE : printed(ENG_EXIT_OK);
		return printed(commands[i].run(&cli));
	}
	if (argc > 1 && strcmp(argv[1], "--help") && strcmp(argv[1], "help"))
		fprintf(stderr,
			"kv-engine: %s: no such command (run, serve, eval, bench)\n",
			argv[1]);
	else if (eng_cli_parse(KV_MIN(argc, 2), argv, &cli) == 1)
		return printed(ENG_EXIT_OK);
	return ENG_EXIT_USAGE;
}
