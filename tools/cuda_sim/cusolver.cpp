// libcusolver.so.11, simulated: only what MXNet calls whenever it makes a stream. All else stops
// the program with its name.

namespace {

struct Handle {
  void* stream = nullptr;
};

}  // namespace

extern "C" {

int cusolverDnCreate(Handle** handle) {
  *handle = new Handle;
  return 0;
}

int cusolverDnDestroy(Handle* handle) {
  delete handle;
  return 0;
}

int cusolverDnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}

}  // extern "C"
