/* A stand-in for libnvidia-ml.so.1 that answers from the file named by NVML_STAND_IN, so that the real pynvml runs.
 *
 * Each line is `key = value`. A key is the question and its arguments, `*` for any; the most special one counts.
 * A value `error N` makes the call return N. What the file does not say is not supported, a link an invalid argument.
 *
 *     count = 2
 *     name * = NVIDIA H100 80GB HBM3
 *     link 0 3 = gpu 00000000:3B:00.0      (or `switch`, `off`)
 *     ancestor 0 1 = 50
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

struct pci_info { /* nvmlPciInfo_t */
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

static char keys[4096][64], values[4096][256];
static int num_lines;

static void load(void)
{
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    char line[512];
    while (file && fgets(line, sizeof line, file) && num_lines < 4096)
        if (sscanf(line, "%63[^=]= %255[^\n]", keys[num_lines], values[num_lines]) == 2) {
            keys[num_lines][strlen(keys[num_lines]) - 1] = 0; /* the blank before = */
            num_lines++;
        }
    if (file)
        fclose(file);
}

static const char *find(const char *key)
{
    for (int i = num_lines - 1; i >= 0; i--) /* a later line replaces an earlier one */
        if (!strcmp(keys[i], key))
            return values[i];
    return NULL;
}

/* The value of a question with up to two arguments (-1: none), from the most special key to the most general. */
static const char *answer(const char *question, int first, int second)
{
    char key[64];
    const char *value;
    if (second >= 0) {
        snprintf(key, sizeof key, "%s %d %d", question, first, second);
        if ((value = find(key)))
            return value;
        snprintf(key, sizeof key, "%s %d *", question, first);
        if ((value = find(key)))
            return value;
        snprintf(key, sizeof key, "%s * *", question);
        return find(key);
    }
    snprintf(key, sizeof key, "%s %d", question, first);
    if (first >= 0 && (value = find(key)))
        return value;
    snprintf(key, sizeof key, first >= 0 ? "%s *" : "%s", question);
    return find(key);
}

static int code(const char *value, int otherwise)
{
    int number;
    if (!value)
        return otherwise;
    return sscanf(value, "error %d", &number) == 1 ? number : SUCCESS;
}

static int index_of(void *handle) { return (int)((size_t)handle - 1); }

static int number(const char *question, int first, int second, unsigned *out)
{
    const char *value = answer(question, first, second);
    int result = code(value, NOT_SUPPORTED);
    if (result == SUCCESS)
        *out = (unsigned)strtoul(value, NULL, 0);
    return result;
}

static int words(const char *question, void *handle, unsigned size, unsigned long long *out)
{
    const char *value = answer(question, index_of(handle), -1);
    int result = code(value, NOT_SUPPORTED);
    char *next = (char *)value;
    for (unsigned i = 0; result == SUCCESS && i < size; i++)
        out[i] = strtoull(next, &next, 16);
    return result;
}

static int string(const char *question, void *handle, char *out, unsigned length)
{
    const char *value = answer(question, index_of(handle), -1);
    int result = code(value, NOT_SUPPORTED);
    if (result == SUCCESS)
        snprintf(out, length, "%s", value);
    return result;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    load();
    return code(answer("init", -1, -1), SUCCESS);
}

EXPORT int nvmlShutdown(void) { return SUCCESS; }

EXPORT const char *nvmlErrorString(int result) { return "an error of the stand-in"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { return number("count", -1, -1, count); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = (void *)(size_t)(index + 1);
    return code(answer("handle", (int)index, -1), SUCCESS);
}

EXPORT int nvmlDeviceGetName(void *gpu, char *out, unsigned length) { return string("name", gpu, out, length); }

EXPORT int nvmlDeviceGetUUID(void *gpu, char *out, unsigned length) { return string("uuid", gpu, out, length); }

EXPORT int nvmlDeviceGetPciInfo_v3(void *gpu, struct pci_info *out)
{
    return string("bus", gpu, out->bus_id, sizeof out->bus_id);
}

EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *out)
{
    return number("generation", index_of(gpu), -1, out);
}

EXPORT int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *out) { return number("width", index_of(gpu), -1, out); }

EXPORT int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending)
{
    *pending = 0;
    return number("mig", index_of(gpu), -1, current);
}

EXPORT int nvmlDeviceGetNumaNodeId(void *gpu, unsigned *out) { return number("node", index_of(gpu), -1, out); }

EXPORT int nvmlDeviceGetVirtualizationMode(void *gpu, unsigned *out)
{
    return number("virtual", index_of(gpu), -1, out);
}

EXPORT int nvmlDeviceGetCpuAffinity(void *gpu, unsigned size, unsigned long long *out)
{
    return words("cpus", gpu, size, out);
}

EXPORT int nvmlDeviceGetMemoryAffinity(void *gpu, unsigned size, unsigned long long *out, unsigned scope)
{
    return words("nodes", gpu, size, out);
}

EXPORT int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *out)
{
    const char *value = answer("link", index_of(gpu), (int)link);
    *out = value && strcmp(value, "off");
    return code(value, INVALID_ARGUMENT);
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, unsigned *out)
{
    const char *value = answer("link", index_of(gpu), (int)link);
    *out = value && !strncmp(value, "gpu ", 4) ? 0 : value && !strcmp(value, "switch") ? 2 : 255;
    return code(answer("type", index_of(gpu), -1), SUCCESS);
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, struct pci_info *out)
{
    const char *value = answer("link", index_of(gpu), (int)link);
    int is_gpu = value && !strncmp(value, "gpu ", 4);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", is_gpu ? value + 4 : "00000000:00:00.0");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkVersion(void *gpu, unsigned link, unsigned *out)
{
    return number("version", index_of(gpu), -1, out);
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *out)
{
    return number("ancestor", index_of(one), index_of(other), out);
}

EXPORT int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned direction, unsigned *out)
{
    return number(direction == 0 ? "read" : "write", index_of(one), index_of(other), out);
}
