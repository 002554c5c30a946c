"""The gRPC edge: conversion, the status table, servers, channels and interceptors. Protos stop here."""
