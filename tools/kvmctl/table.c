/* SPDX-License-Identifier: Apache-2.0 */
/* table.c - lists as aligned columns, CSV or ids; sizes and ages for people. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

#define CELL_BYTES 160

double ctl_num(const cJSON *object, const char *field)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, field);

	if (cJSON_IsString(item))
		return strtod(item->valuestring, NULL);
	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

const char *ctl_str(const cJSON *object, const char *field)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, field);

	return cJSON_IsString(item) ? item->valuestring : "-";
}

const char *ctl_size(const struct ctl *ctl, double bytes, char *out, size_t room)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
	u32 u = 0;

	if (ctl->args.bytes || ctl->args.nounits) {
		snprintf(out, room, "%.0f", bytes);
		return out;
	}
	if (bytes >= 9007199254740992.0) {
		snprintf(out, room, "no limit");
		return out;
	}
	for (; bytes >= 1024 && u + 1 < KV_ARRAY_SIZE(units); u++)
		bytes /= 1024;
	snprintf(out, room, bytes >= 100 || u == 0 ? "%.0f %s" : "%.1f %s", bytes,
		 units[u]);
	return out;
}

const char *ctl_age(double ms, char *out, size_t room)
{
	if (ms < 10000)
		snprintf(out, room, "%.0f ms", ms);
	else if (ms < 600e3)
		snprintf(out, room, "%.0f s", ms / 1e3);
	else if (ms < 36e6)
		snprintf(out, room, "%.0f min", ms / 60e3);
	else if (ms < 3 * 864e5)
		snprintf(out, room, "%.0f h", ms / 36e5);
	else
		snprintf(out, room, "%.0f d", ms / 864e5);
	return out;
}

/* "2: e17 for 3 ms, e18 for 0 ms" */
static void steps_text(const cJSON *steps, char *out, size_t room)
{
	const cJSON *step;
	char age[32];
	size_t n;

	n = (size_t)snprintf(out, room, "%d", cJSON_GetArraySize(steps));
	cJSON_ArrayForEach(step, steps)
	{
		if (n >= room)
			return;
		n += (size_t)snprintf(
			out + n, room - n, "%s e%.0f for %s",
			step == steps->child ? ":" : ",", ctl_num(step, "epoch"),
			ctl_age(ctl_num(step, "seen_ms"), age, sizeof(age)));
	}
}

static void list_text(const cJSON *list, char *out, size_t room)
{
	const cJSON *item;
	size_t n = 0;

	out[0] = 0;
	cJSON_ArrayForEach(item, list)
	{
		if (n >= room)
			return;
		n += (size_t)snprintf(out + n, room - n, "%s%s", n ? "," : "",
				      cJSON_IsString(item) ? item->valuestring : "?");
	}
}

static void cell(const struct ctl *ctl, const cJSON *row, const struct ctl_column *col,
		 char *out)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(row, col->field);

	if (!item || cJSON_IsNull(item)) {
		strcpy(out, "-");
		return;
	}
	switch (col->kind) {
	case CTL_SIZE:
		ctl_size(ctl, ctl_num(row, col->field), out, CELL_BYTES);
		return;
	case CTL_AGE:
		if (ctl->args.nounits)
			break;
		ctl_age(ctl_num(row, col->field), out, CELL_BYTES);
		return;
	case CTL_STEPS:
		steps_text(item, out, CELL_BYTES);
		return;
	case CTL_LIST:
		list_text(item, out, CELL_BYTES);
		return;
	case CTL_RATIO:
		snprintf(out, CELL_BYTES, "%.2f", item->valuedouble);
		return;
	case CTL_TEXT:
	case CTL_COUNT:
		break;
	}
	if (cJSON_IsString(item))
		snprintf(out, CELL_BYTES, "%s", item->valuestring);
	else if (cJSON_IsBool(item))
		strcpy(out, cJSON_IsTrue(item) ? "yes" : "no");
	else
		snprintf(out, CELL_BYTES, "%.0f", item->valuedouble);
}

/* Columns to show, in order. Return: how many; -1 unknown field, said */
static int choose(struct ctl *ctl, const struct ctl_column *columns,
		  const struct ctl_column **chosen)
{
	u32 i, k;
	int nr = 0;

	if (!ctl->args.nr_fields) {
		for (i = 0; columns[i].field; i++)
			if (!columns[i].more && nr < CTL_FIELDS_MAX)
				chosen[nr++] = &columns[i];
		return nr;
	}
	for (k = 0; k < ctl->args.nr_fields; k++) {
		for (i = 0;
		     columns[i].field && strcmp(columns[i].field, ctl->args.fields[k]);
		     i++)
			;
		if (!columns[i].field) {
			ctl_error(ctl, CTL_USAGE, "--fields: \"%s\": no such field here",
				  ctl->args.fields[k]);
			return -1;
		}
		chosen[nr++] = &columns[i];
	}
	return nr;
}

static void csv_put(const char *text, bool first)
{
	printf("%s", first ? "" : ",");
	if (!strpbrk(text, ",\"\n")) {
		printf("%s", text);
		return;
	}
	putchar('"');
	for (; *text; text++) {
		if (*text == '"')
			putchar('"');
		putchar(*text);
	}
	putchar('"');
}

static void list_csv(struct ctl *ctl, const cJSON *array, const struct ctl_column **cols,
		     int nr)
{
	char text[CELL_BYTES];
	const cJSON *row;
	int i;

	for (i = 0; i < nr && !ctl->args.noheader; i++)
		csv_put(cols[i]->field, i == 0);
	if (!ctl->args.noheader)
		putchar('\n');
	cJSON_ArrayForEach(row, array)
	{
		for (i = 0; i < nr; i++) {
			cell(ctl, row, cols[i], text);
			csv_put(text, i == 0);
		}
		putchar('\n');
	}
}

static bool flush_right(enum ctl_kind kind)
{
	return kind == CTL_COUNT || kind == CTL_SIZE || kind == CTL_AGE;
}

static void put_cell(const struct ctl_column *col, const char *text, int width, bool last)
{
	if (flush_right(col->kind))
		printf("%*s", width, text);
	else if (last)
		printf("%s", text);
	else
		printf("%-*s", width, text);
	printf("%s", last ? "\n" : "  ");
}

static void list_table(struct ctl *ctl, const cJSON *array,
		       const struct ctl_column **cols, int nr)
{
	int width[CTL_FIELDS_MAX], i, len;
	char text[CELL_BYTES];
	const cJSON *row;

	for (i = 0; i < nr; i++)
		width[i] = (int)strlen(cols[i]->title);
	cJSON_ArrayForEach(row, array)
	{
		for (i = 0; i < nr; i++) {
			cell(ctl, row, cols[i], text);
			len = (int)strlen(text);
			width[i] = KV_MAX(width[i], len);
		}
	}
	for (i = 0; i < nr && !ctl->args.noheader; i++)
		put_cell(cols[i], cols[i]->title, width[i], i == nr - 1);
	cJSON_ArrayForEach(row, array)
	{
		for (i = 0; i < nr; i++) {
			cell(ctl, row, cols[i], text);
			put_cell(cols[i], text, width[i], i == nr - 1);
		}
	}
}

int ctl_list(struct ctl *ctl, const cJSON *array, const struct ctl_column *columns)
{
	const struct ctl_column *cols[CTL_FIELDS_MAX];
	char text[CELL_BYTES];
	const cJSON *row;
	int nr;

	if (ctl->args.quiet) {
		cJSON_ArrayForEach(row, array)
		{
			cell(ctl, row, &columns[0], text);
			printf("%s\n", text);
		}
		return CTL_OK;
	}
	nr = choose(ctl, columns, cols);
	if (nr < 0)
		return CTL_USAGE;
	if (ctl->args.format == CTL_CSV)
		list_csv(ctl, array, cols, nr);
	else
		list_table(ctl, array, cols, nr);
	return CTL_OK;
}

int ctl_json(struct ctl *ctl, cJSON *reply, const char *name)
{
	char schema[64], *text;
	cJSON *item;

	snprintf(schema, sizeof(schema), "kvmctl.%s/1", name);
	cJSON_DeleteItemFromObjectCaseSensitive(reply, "ok");
	item = cJSON_CreateString(schema);
	cJSON_AddItemToObject(reply, "schema", item);
	/* First in the document, so that a reader meets it first. */
	cJSON_DetachItemViaPointer(reply, item);
	cJSON_InsertItemInArray(reply, 0, item);
	text = ctl->args.pretty ? cJSON_Print(reply) : cJSON_PrintUnformatted(reply);
	if (!text)
		return ctl_error(ctl, CTL_FAILED, "out of memory");
	printf("%s\n", text);
	cJSON_free(text);
	return CTL_OK;
}
