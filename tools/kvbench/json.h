/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - figures with a spread, as kvbench prints them. */
#ifndef KVB_JSON_H
#define KVB_JSON_H

#include <stdint.h>

struct cJSON;

/**
 * struct kvb_dist - what is told of many samples
 * @p50, @p99: nearest rank
 * @mean: of all samples
 * @nr: samples
 */
struct kvb_dist {
	double p50;
	double p99;
	double mean;
	uint32_t nr;
};

/** kvb_dist_of() - sorts @samples; of none all is 0 */
void kvb_dist_of(struct kvb_dist *ret, double *samples, uint32_t nr);

/** kvb_json_dist() - add {"p50":, "p99":, "mean":, "samples":} under @name */
void kvb_json_dist(struct cJSON *object, const char *name, const struct kvb_dist *dist);

/** kvb_json_print() - one document on stdout; consumes @object. Return: 0; -ENOMEM */
int kvb_json_print(struct cJSON *object);

#endif
