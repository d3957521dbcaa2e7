/* SPDX-License-Identifier: Apache-2.0 */
/* json.c - see json.h */
#include "tools/kvbench/json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int cmp_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

void kvb_dist_of(struct kvb_dist *ret, double *samples, uint32_t nr)
{
	double sum = 0;

	*ret = (struct kvb_dist){0};
	if (!nr)
		return;
	qsort(samples, nr, sizeof(*samples), cmp_double);
	for (uint32_t i = 0; i < nr; i++)
		sum += samples[i];
	*ret = (struct kvb_dist){.p50 = samples[(nr - 1) / 2],
				 .p99 = samples[((uint64_t)nr * 99 + 99) / 100 - 1],
				 .mean = sum / nr,
				 .nr = nr};
}

void kvb_json_dist(cJSON *object, const char *name, const struct kvb_dist *dist)
{
	cJSON *o = cJSON_AddObjectToObject(object, name);

	/* a tenth of a nanosecond is all that was measured */
	cJSON_AddNumberToObject(o, "p50", round(dist->p50 * 10) / 10);
	cJSON_AddNumberToObject(o, "p99", round(dist->p99 * 10) / 10);
	cJSON_AddNumberToObject(o, "mean", round(dist->mean * 10) / 10);
	cJSON_AddNumberToObject(o, "samples", dist->nr);
}

int kvb_json_print(cJSON *object)
{
	char *text = cJSON_Print(object);

	cJSON_Delete(object);
	if (!text)
		return -ENOMEM;
	puts(text);
	cJSON_free(text);
	return 0;
}
