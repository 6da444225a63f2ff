// Says why a program dies when it touches memory of a device that it must not touch.
#include <signal.h>

#include <cstdio>

#include "runtime.h"

namespace cuda_sim {

thread_local const char* running_operation = nullptr;

namespace {

struct sigaction previous;

void explain(int number, siginfo_t* fault, void*) {
  char who[300] = "host code";
  if (running_operation) snprintf(who, sizeof who, "'%.250s'", running_operation);
  char text[600] = "";
  if (on_device(fault->si_addr)) {
    const char* why = running_operation ? ", to which its device has no peer access" : "";
    snprintf(text, sizeof text, "\ncuda_sim: %s touched memory of gpu %d%s\n", who,
             device_of(fault->si_addr), why);
  } else if (bytes_of_device(fault->si_addr)) {
    const char* where = was_released(fault->si_addr) ? "that was released" : "outside of any array";
    snprintf(text, sizeof text, "\ncuda_sim: %s touched device memory %s\n", who, where);
  }
  say(text);
  // The instruction runs again when this returns, and the handler from before gets the signal. Not
  // in a stream's thread: MXNet's handler calls exit(), which would wait for that stream.
  struct sigaction none = {};
  none.sa_handler = SIG_DFL;
  sigaction(SIGSEGV, running_operation ? &none : &previous, nullptr);
  if (fault->si_code <= 0) raise(number);  // sent by a process, not by an instruction
}

}  // namespace

void explain_faults() {
  struct sigaction action = {};
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}

}  // namespace cuda_sim
